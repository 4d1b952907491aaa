"""What models write, on the page: Markdown, formulas, code with its colours; and that none of it takes long."""

from chat_cases import HTML
from pages import PageTest, expect, said

# (language, text, some of the pieces)
CODE = [
    ("python", 'def f(x: int):\n    # two\n    return f"{x}" + str(1.5)', [["keyword", "def"], ["comment", "# two"], ["string", 'f"{x}"'],
                                                                          ["number", "1.5"], ["function", "f"], ["type", "int"]]),
    ("c++", "#include <map>\nint main() { return 0x1F; } // end", [["meta", "#include <map>"], ["type", "int"], ["number", "0x1F"],
                                                                  ["comment", "// end"]]),
    ("ts", "const a: string = `x ${y}`;", [["keyword", "const"], ["type", "string"], ["string", "`x ${y}`"]]),
    ("rust", "fn f<'a>(x: &'a str) { println!(\"{}\", 1u8) }", [["keyword", "fn"], ["variable", "'a"], ["function", "println!"]]),
    ("go", "func main() { defer f() }", [["keyword", "func"], ["keyword", "defer"], ["function", "main"]]),
    ("bash", "cd /tmp # go\necho \"$HOME\" --all", [["function", "cd"], ["comment", "# go"], ["meta", "--all"]]),
    ("json", '{"a": [1, true, "b"]}', [["property", '"a"'], ["number", "1"], ["constant", "true"], ["string", '"b"']]),
    ("html", '<!-- c --><a href="x">y</a>', [["comment", "<!-- c -->"], ["property", "href"], ["string", '"x"']]),
    ("css", ".a { color: #fff; /* c */ }", [["type", ".a"], ["property", "color"], ["number", "#fff"], ["comment", "/* c */"]]),
    ("sql", "SELECT a FROM t WHERE b = 'c' -- d", [["keyword", "SELECT"], ["string", "'c'"], ["comment", "-- d"]]),
    ("yaml", "key: value # c\nn: 3", [["property", "key"], ["comment", "# c"], ["number", "3"]]),
    ("toml", "[table]\nkey = true", [["keyword", "[table]"], ["property", "key"], ["constant", "true"]]),
    ("diff", "@@ -1 +1 @@\n-old\n+new", [["meta", "@@ -1 +1 @@"], ["removed", "-old"], ["added", "+new"]]),
    ("java", "public class A { String s = null; }", [["keyword", "class"], ["type", "String"], ["constant", "null"]]),
]

# [source, the HTML it must become without classes and the copy buttons]
MARKDOWN = [
    ["plain *it* **bold** `a<b` ~~no~~", "<p>plain <em>it</em> <strong>bold</strong> <code>a&lt;b</code> <del>no</del></p>"],
    ["a\n\nb\nc", "<p>a</p><p>b\nc</p>"],
    ["**bold with *it* inside**", "<p><strong>bold with <em>it</em> inside</strong></p>"],
    ["snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"],
    ["unclosed **bold and `code", "<p>unclosed **bold and `code</p>"],
    ["`a * b` and *c*", "<p><code>a * b</code> and <em>c</em></p>"],
    ["## Head\ntext", "<h4>Head</h4><p>text</p>"],
    ["- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"],
    ["3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'],
    ["1. a\n\n   more\n\n2. b", "<ol><li><p>a</p><p>more</p></li><li>b</li></ol>"],
    ["text\n- a", "<p>text</p><ul><li>a</li></ul>"],
    ["> quoted\n> **more**", "<blockquote><p>quoted\n<strong>more</strong></p></blockquote>"],
    ["a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"],
    ["[ok](https://example.org/a_(b)) [bad](javascript:alert(1)) [bad](data:text/html,x)",
     '<p><a href="https://example.org/a_(b)" target="_blank" rel="noopener noreferrer">ok</a> '
     "[bad](javascript:alert(1)) [bad](data:text/html,x)</p>"],
    ["see https://example.org/x.", '<p>see <a href="https://example.org/x" target="_blank" rel="noopener noreferrer">'
     "https://example.org/x</a>.</p>"],
    [HTML, "<p>" + HTML.replace("<", "&lt;").replace(">", "&gt;") + "</p>"],
    ["\\*not\\*", "<p>*not*</p>"],
    ["so $a_1*b_2*c$ and \\(x\\), not $5 or $6 and US$7", "<p>so {a_1*b_2*c} and {x}, not $5 or $6 and US$7</p>"],
    ["$$x$$ inside", "<p>{x} inside</p>"],
    ["a\n$$\nx = 1\n$$\nb", '<p>a</p><div class="formula" tabindex="0" role="region" aria-label="Formula">{x = 1}</div><p>b</p>'],
    ["\\[ y \\]", '<div class="formula" tabindex="0" role="region" aria-label="Formula">{y}</div>'],
    ["\\begin{align}\na\n\\end{align}",
     '<div class="formula" tabindex="0" role="region" aria-label="Formula">{\\begin{align}\na\n\\end{align}}</div>'],
    ["open $x and \\(y and\n\n$$\nz", "<p>open $x and (y and</p><p>$$\nz</p>"],
    ["`$x$` $\\text{<b>}$", "<p><code>$x$</code> {\\text{&lt;b&gt;}}</p>"],
]


class AnswerTest(PageTest):
    def test_markdown(self):
        page = self.open()
        render = """async (text) => {
          const { markdown } = await import("/markdown.js");
          const root = document.createElement("div");
          root.append(...markdown(text));
          root.querySelectorAll(".bar").forEach((bar) => bar.remove());
          root.querySelectorAll("math").forEach((math) => math.replaceWith(`{${math.getAttribute("alttext")}}`));
          return root.innerHTML;
        }"""
        for source, expected in MARKDOWN:
            self.assertEqual(page.evaluate(render, source), expected, source)
        table = page.evaluate(render, "| a | b |\n|---|--:|\n| 1 | **2** |")
        self.assertIn("<th>a</th><th class=\"right\">b</th>", table)
        self.assertIn("<td>1</td><td class=\"right\"><strong>2</strong></td>", table)
        code = page.evaluate(render, "```python\nif a < b:\n    pass\n```")
        self.assertIn('<code><span class="tok-keyword">if</span> a &lt; b:\n    <span class="tok-keyword">pass</span></code>', code)
        # A text that grows ends as if it had come at once.
        grows = """async (text) => {
          const { GrowingMarkdown, markdown } = await import("/markdown.js");
          const [grown, whole] = [document.createElement("div"), document.createElement("div")];
          const growing = new GrowingMarkdown(grown);
          for (let end = 0; end <= text.length; end++) growing.update(text.slice(0, end));
          whole.append(...markdown(text));
          return grown.innerHTML === whole.innerHTML;
        }"""
        self.assertTrue(page.evaluate(grows, "\n\n".join(source for source, _ in MARKDOWN) + "\n\n```js\nlet a;\n```\nend"))
        # Texts made to take long: four times the text is four times the work, not sixteen. Characters that the parser
        # searches and copies are counted, since time is anybody's guess on a busy machine.
        work = """async ([piece, count]) => {
          const { markdown } = await import("/markdown.js");
          const text = piece.repeat(count);
          const { indexOf, lastIndexOf, slice } = String.prototype;
          let characters = text.length;
          String.prototype.indexOf = function (what, from = 0) {
            const at = indexOf.call(this, what, from);
            characters += (at < 0 ? this.length : at) - from;
            return at;
          };
          String.prototype.lastIndexOf = function (what, from = this.length) {
            const at = lastIndexOf.call(this, what, from);
            characters += from - at;
            return at;
          };
          String.prototype.slice = function (...range) {
            const part = slice.apply(this, range);
            characters += part.length;
            return part;
          };
          markdown(text);
          Object.assign(String.prototype, { indexOf, lastIndexOf, slice });
          return characters;
        }"""
        for piece in ("*a ", "**a", "_a", "`", "``a`", "[", "[a](", "![", "<", "> ", "- ", "|a", "a\n", "~~~", "h", "***", "a`*b`",
                      "$", "$a", "$$", "\\(", "\\[\n", "$$\n", "$x$ ", "$a $b"):
            self.assertLess(page.evaluate(work, [piece, 8000]) / page.evaluate(work, [piece, 2000]), 6, piece)

    def test_formulas_are_drawn(self):
        page = self.open()
        self.answers(page, said("Roots: $x_1$ of\n\n$$x = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a} \\unheard{of}$$\n\nthat is all."))
        self.send(page, "Roots?")
        expect(page.locator("math")).to_have_count(2)
        self.assertEqual(page.evaluate("document.querySelector('math msub').namespaceURI"), "http://www.w3.org/1998/Math/MathML")
        fraction = page.locator("math mfrac").bounding_box()
        self.assertGreater(fraction["height"], page.locator("math mfrac > :last-child").bounding_box()["height"] * 1.8)  # above and below
        expect(page.locator("math .unknown")).to_have_text("\\unheard")
        expect(page.locator(".assistant > .prose > p").last).to_have_text("that is all.")

    def test_code_has_colours_and_stays_the_same_text(self):
        page = self.open()
        pieces = """async ([text, language]) => (await import("/highlight.js")).pieces(text, language)"""
        for language, text, expected in CODE:
            found = page.evaluate(pieces, [text, language])
            self.assertEqual("".join(piece for _, piece in found), text, language)
            for kind, piece in expected:
                self.assertIn([kind, piece], found, f"{language}: {found}")
        self.assertEqual(page.evaluate(pieces, ["a < b", "nobody's"]), [["", "a < b"]])
