"""Files that go along with a message: text and PDFs, chosen, dropped or pasted, and how much of the context they take."""

import re
import subprocess
import tempfile
from pathlib import Path

from pages import PageTest, WORLD, expect, said

PRINTED = """<h1>The mill by the river</h1><p>Grüße, naïve café: 12 € — “quoted”. Ωμέγα, привет.</p>
<p style="page-break-before: always">Second page, with <b>bold</b> and <i>italic</i> words.</p>"""
PRINTED_TEXT = "The mill by the river\nGrüße, naïve café: 12 € — “quoted”. Ωμέγα, привет.\n\nSecond page, with bold and italic words."
SIMPLE_TEXT = "Café (au lait)\nKerning apart\n\nfi: fi á\n\nInside a form"

# A file that is dropped on, or pasted into, the element.
HAND_OVER = """([selector, kind, name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name, { type: "text/plain" }));
  const target = document.querySelector(selector);
  const event = kind === "paste" ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
    : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
  return target.dispatchEvent(event);
}"""


class FileTest(PageTest):
    def attach(self, page, *files):
        page.set_input_files("#attach-file", [{"name": name, "mimeType": "", "buffer": data} for name, data in files])

    def test_text_files_go_along(self):
        page = self.open()
        self.answers(page, said("Two lines."))
        self.attach(page, ("notes.txt", "one\ntwo ``` three\n".encode()), ("latin.csv", "a;\xe9\n".encode("latin-1")))
        chips = page.locator("#attachments .chip-name")
        expect(chips).to_have_text(["notes.txt", "latin.csv"])
        self.assertFalse(page.evaluate(HAND_OVER, ["#scroll", "drop", "dropped.md", "# dropped"]))
        expect(chips).to_have_count(3)
        self.assertFalse(page.evaluate(HAND_OVER, ["#prompt", "paste", "pasted.py", "print()"]))
        expect(chips).to_have_text(["notes.txt", "latin.csv", "dropped.md", "pasted.py"])
        page.get_by_role("button", name="Remove dropped.md").click()
        expect(page.locator("#meter")).to_have_text(re.compile(r"^[\d,]+ of [\d,]+ tokens$"))
        with page.expect_request("**/v1/chat/completions") as request:
            self.send(page, "How many lines?")
        self.assertEqual(request.value.post_data_json["messages"][0]["content"],
                         'File "notes.txt":\n````\none\ntwo ``` three\n````\n\nFile "latin.csv":\n```\na;é\n```\n\n'
                         'File "pasted.py":\n```\nprint()\n```\n\nHow many lines?')
        expect(page.locator("#attachments")).to_be_hidden()
        expect(page.locator(".user .chip-name")).to_have_text(["notes.txt", "latin.csv", "pasted.py"])
        page.locator(".file summary").first.click()
        expect(page.locator(".file pre").first).to_have_text("one\ntwo ``` three")
        page.reload()
        expect(page.locator(".user .chip-name")).to_have_count(3)

    def test_what_does_not_fit_or_is_no_text_is_said(self):
        page = self.open()
        self.attach(page, ("picture.png", b"\x89PNG\r\n\x1a\n\0\0\0"))
        expect(page.locator("#toast")).to_have_text("picture.png is no picture that this browser can read.")
        self.attach(page, ("empty.txt", b""))
        expect(page.locator("#toast")).to_have_text("empty.txt is empty.")
        expect(page.locator("#attachments")).to_be_hidden()
        self.attach(page, ("long.txt", b"A mill grinds grain. " * 2000))
        expect(page.locator("#meter.over")).to_have_text(re.compile(r"^[\d,]+ of [\d,]+ tokens: more than the model can read$"))

    def test_pdfs_of_several_makes(self):
        python = self.package("pikepdf==10.17.0")
        folder = tempfile.TemporaryDirectory(prefix="millrace-web-test-")
        self.addCleanup(folder.cleanup)
        printed = Path(folder.name) / "printed.pdf"
        printer = WORLD.browser.new_page()
        printer.set_content(PRINTED)
        printer.pdf(path=printed)
        printer.close()
        subprocess.run([python, Path(__file__).with_name("make_pdfs.py"), folder.name, printed], check=True)
        page = self.open()
        read = """async (input) => {
          const { readAttachment } = await import("/attachments.js");
          return readAttachment(document.querySelector("#attach-file").files[0]).catch((error) => error.message);
        }"""
        expected = {
            "printed": {"text": PRINTED_TEXT, "pages": 2, "empty": 0},
            "packed": {"text": PRINTED_TEXT, "pages": 2, "empty": 0},
            "simple": {"text": SIMPLE_TEXT, "pages": 3, "empty": 1},
            "locked": "No text could be taken from locked.pdf: it is encrypted: save it without protection first.",
            "pictures": "No text could be taken from pictures.pdf: there is no text in it: its pages are pictures, perhaps of a scanner.",
            "cut": "No text could be taken from cut.pdf: it is damaged: no pages were found.",
        }
        page.evaluate("document.querySelector('#attach-file').addEventListener('change', (event) => event.stopImmediatePropagation(), true)")
        for name, found in expected.items():
            page.set_input_files("#attach-file", Path(folder.name) / f"{name}.pdf")
            result = page.evaluate(read)
            self.assertEqual(result if isinstance(found, str) else {**result, "name": None}, found if isinstance(found, str) else {**found, "name": None})
        page.reload()
        page.set_input_files("#attach-file", Path(folder.name) / "simple.pdf")
        expect(page.locator("#toast")).to_have_text("simple.pdf: 1 of its 3 pages have no text, only pictures.")
        expect(page.locator("#attachments .chip")).to_contain_text("3 pages")
