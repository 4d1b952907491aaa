"""Tools of a real server of the Model Context Protocol: added by the reader, allowed by the reader, run by the page."""

from pages import PageTest, expect, said
from served import free_port

class ToolTest(PageTest):
    def add(self, page, url):
        page.click("#open-tools")
        page.get_by_label("Address").fill(url)
        page.get_by_role("button", name="Add").click()

    def test_tools_are_allowed_and_run(self):
        url = self.tool_server()
        page = self.open(may_reach=[url])
        self.add(page, url)
        expect(page.locator("#tool-servers li b")).to_have_text(["add", "water_level", "fails", "slow"])
        expect(page.locator("#tool-servers h3")).to_have_text("Mill tools")
        page.get_by_label("Offer slow").uncheck()
        page.keyboard.press("Escape")
        asked = []
        page.on("request", lambda request: request.url.endswith("/v1/chat/completions") and asked.append(request.post_data_json))
        self.answers(page, said(calls=[("add", {"a": 2, "b": 40}), ("water_level", {"river": "Aare"})]), said("It is 42."),
                     said(calls=[("add", {"a": 1, "b": 1})]), said("Two."),
                     said(calls=[("fails", {}), ("water_level", {"river": "Aare"})]), said("That failed."))
        self.send(page, "2 + 40?", wait=False)
        expect(page.locator(".call-state")).to_have_text(["asks for permission"] * 2)
        self.assertEqual([tool["function"]["name"] for tool in asked[0]["tools"]], ["add", "water_level", "fails"])
        self.assertEqual(asked[0]["tools"][0]["function"]["parameters"]["required"], ["a", "b"])
        self.assertEqual(page.locator(".call code").first.inner_text(), '{\n  "a": 2,\n  "b": 40\n}')
        page.get_by_role("button", name="Always allow").first.click()
        expect(page.locator(".call-state").first).to_have_text("done")
        self.assertEqual(len(asked), 1)  # the other call still waits
        page.get_by_role("button", name="Allow once").click()
        expect(page.locator(".assistant > .prose").last).to_have_text("It is 42.")
        self.assertEqual([m["content"] for m in asked[1]["messages"][2:]], ["42", "The Aare stands at 42 cm."])
        page.locator(".call summary").first.click()
        expect(page.locator(".call").first.locator("code").last).to_have_text("42")
        self.send(page, "1 + 1?", wait=False)  # runs without a question
        expect(page.locator(".assistant > .prose").last).to_have_text("Two.")
        self.send(page, "And what fails?", wait=False)
        page.get_by_role("button", name="Allow once").first.click()
        expect(page.locator(".call-state.failed")).to_have_text("failed")
        page.get_by_role("button", name="Refuse").click()
        expect(page.locator(".assistant > .prose").last).to_have_text("That failed.")
        self.assertEqual([m["content"] for m in asked[-1]["messages"][-2:]], ["Error executing tool fails", "The user refused this call."])
        page.reload()
        expect(page.locator(".call-state")).to_have_text(["done", "done", "done", "failed", "failed"])

    def test_a_tool_is_stopped_and_a_server_forgotten(self):
        url = self.tool_server("json")
        page = self.open(may_reach=[url])
        self.add(page, url)
        page.get_by_label("When slow is called").select_option("always")
        page.keyboard.press("Escape")
        self.answers(page, said(calls=[("slow", {})]))
        self.send(page, "Take your time", wait=False)
        expect(page.locator(".call-state")).to_have_text("running…")
        page.click("#stop")
        expect(page.locator(".call-state")).to_have_text("failed")
        expect(page.locator("#send")).to_be_visible()
        page.click("#open-tools")
        page.get_by_role("button", name="Forget Mill tools").click()
        expect(page.locator("#tool-servers section")).to_have_count(0)

    def test_what_is_wrong_with_a_tool_server_is_said(self):
        nobody = f"http://127.0.0.1:{free_port()}/mcp"
        page = self.open(may_reach=[nobody])
        problem = page.locator("#tools .problem")
        self.add(page, "javascript:alert(1)")
        expect(problem).to_have_text("The address of a tool server begins with http:// or https://.")
        page.get_by_label("Address").fill(nobody)
        page.keyboard.press("Enter")
        expect(problem).to_have_text("The tool server cannot be reached, or does not let this page talk to it (CORS).")
        # Only the worker may look elsewhere: the page itself cannot.
        refused = page.evaluate("(url) => fetch(url).then(() => 'reached', () => 'refused')", nobody)
        self.assertEqual(refused, "refused")
        self.assertTrue(any("Content Security Policy" in text for text in self.complaints), self.complaints)
        self.complaints = [text for text in self.complaints if "Content Security Policy" not in text and "ERR_CONNECTION_REFUSED" not in text
                           and "Fetch API cannot load" not in text]
