"""The page as an application: installed, without its server, under its policy; and the dashboard's figures."""

import json
import re
from pathlib import Path

from pages import PageTest, expect

WEB = Path(__file__).resolve().parents[2] / "web"


class AppTest(PageTest):
    def test_it_can_be_installed_and_opens_without_its_server(self):
        page = self.open(service_workers="allow")
        page.evaluate("navigator.serviceWorker.ready.then(() => true)")
        page.wait_for_function("navigator.serviceWorker.controller !== null")
        kept = page.evaluate("caches.open('millrace-shell').then((cache) => cache.keys()).then((keys) => keys.map(({ url }) => url))")
        names = {url.rsplit("/", 1)[1] for url in kept}
        self.assertEqual(names - {""}, {path.name for path in WEB.iterdir()} - {"sw.js"})  # all there is, and nothing of the API
        self.send(page, "Hello")
        page.goto(self.server.url + "/dashboard.html")
        expect(page.locator("#tiles .value").first).to_be_visible()
        again = page.evaluate("caches.keys().then((names) => Promise.all(names.map((name) => caches.open(name).then((one) => one.keys())))"
                              ").then((lists) => lists.flat().map(({ url }) => url))")
        self.assertEqual(sorted(again), sorted(kept))
        page.context.set_offline(True)
        page.goto(self.server.url)
        expect(page.locator(".bubble")).to_have_text("Hello")
        expect(page.locator("#model")).to_have_text("No server")
        page.context.set_offline(False)
        expect(page.locator("#model")).to_have_text(re.compile("SmolLM2"))
        self.complaints = [text for text in self.complaints if "ERR_INTERNET_DISCONNECTED" not in text]
        manifest = json.loads((WEB / "manifest.webmanifest").read_text())
        sizes = page.evaluate("""(icons) => Promise.all(icons.map(({ src }) => new Promise((resolve) => {
          const image = new Image();
          image.onload = () => resolve(`${image.naturalWidth}x${image.naturalHeight}`);
          image.src = src;
        })))""", [icon for icon in manifest["icons"] if icon["sizes"] != "any"])
        self.assertEqual(sizes, [icon["sizes"] for icon in manifest["icons"] if icon["sizes"] != "any"])
        errors = page.context.new_cdp_session(page).send("Page.getAppManifest")
        self.assertEqual(errors["errors"], [])

    def test_nothing_is_loaded_or_run_from_elsewhere(self):
        page = self.open()
        policy = page.request.get(self.server.url + "/").headers["content-security-policy"]
        self.assertNotIn("unsafe", policy)
        for directive in ("default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'", "trusted-types millrace"):
            self.assertIn(directive, policy)
        worker = page.request.get(self.server.url + "/mcp_worker.js").headers["content-security-policy"]
        self.assertIn("connect-src http: https:", worker)
        tried = page.evaluate("""async () => {
          const tried = {};
          try { new Worker("theme.js"); tried.worker = true; } catch { tried.worker = false; }
          try { document.createElement("div").innerHTML = "<b>x</b>"; tried.html = true; } catch { tried.html = false; }
          try { (await import("/trusted.js")).scriptUrl("other.js"); tried.other = true; } catch { tried.other = false; }
          return tried;
        }""")
        self.assertEqual(tried, {"worker": False, "html": False, "other": False})
        self.complaints = [text for text in self.complaints if "requires 'Trusted" not in text]

    def test_a_gap_is_a_gap_and_kept_blocks_are_not_in_use(self):
        page = self.open("/dashboard.html")
        expect(page.locator("#tiles .value").first).to_be_visible()

        def change(route):
            stats = self.server.get("/stats")[1]
            stats["history"] |= {"generated_tok_s": [1, 2, None, None, 3, 4], "computed_tok_s": [5, 6, 7, 8, 9, 9], "first_token_p50_s": [None, 0.2, None, 0.1, 0.1, None],
                                 "blocks_used": [1, 2, 3, 4, 5, 6], "blocks_cached": [9, 9, 9, 9, 9, None]}
            stats["blocks"] |= {"total": 100, "used": 6, "cached": 30, "free": 64, "usage": 0.06}
            route.fulfill(json=stats)

        page.route("**/stats", change)
        written = page.locator("#throughput path.line.one")
        expect(written).to_have_count(2)  # two lines, and none over the gap
        expect(page.locator("#throughput path.line.two")).to_have_count(1)
        self.assertEqual([len(written.nth(i).get_attribute("d").split("L")) for i in (0, 1)], [2, 2])
        expect(page.locator("#first-token circle")).to_have_count(1)  # alone between two gaps
        expect(page.locator("#first-token path.line")).to_have_count(1)
        expect(page.locator("#blocks-history .legend")).to_have_text(re.compile("in use by requests.*6.*kept for prefixes.*9"))
        expect(page.locator("#blocks .headline")).to_have_text(re.compile("^6.0%"))
        # In one go: the dashboard draws anew every second.
        widths = page.evaluate("""() => ["one", "two"].map((kind) =>
          document.querySelector(`#blocks rect.${kind}`).getBoundingClientRect().width)""")
        self.assertAlmostEqual(widths[1] / widths[0], 5, delta=0.7)
        expect(page.locator("#blocks .legend li")).to_contain_text(["in use by requests", "kept for prefixes", "free"])
        page.unroute_all(behavior="ignoreErrors")  # one may be under way when the page goes

    def test_the_dashboard_draws_ranks(self):
        def rank(number, heard_s=0.2):
            return {"rank": number, "host": f"node{number}", "pid": 4000 + number, "heard_s": heard_s, "waiting_s": 0.0, "exchanges": 1234,
                    "sent_bytes": [0 if r == number else 1 << 20 for r in range(3)], "received_bytes": [0, 0, 0],
                    "latency_s": [0 if r == number else 4e-5 for r in range(3)], "bytes_per_s": [0 if r == number else 3 << 30 for r in range(3)]}

        group = {"up": True, "wanted": 3, "restarts": 2, "last_loss": "rank 1 (process 7 on node1) has gone",
                 "ranks": [rank(0), rank(1), rank(2, heard_s=2.5)]}
        shown = {}

        def change(route):
            stats = self.server.get("/stats")[1]
            stats["rank_groups"] = shown.get("groups", [])
            stats["rank_sampling"] = {"picked_rows": 95, "gathered_rows": 5}
            route.fulfill(json=stats)

        page = self.open("/dashboard.html", prepare=lambda page: page.route(re.compile("/stats"), change))
        expect(page.locator("#tiles .value").first).to_be_visible()
        expect(page.locator("#ranks-card")).to_be_hidden()  # one process has none
        shown["groups"] = [group]
        expect(page.locator("#ranks .headline")).to_have_text("3 of 3formed anew 2 times · last: rank 1 (process 7 on node1) has gone")
        expect(page.locator("#ranks .rank.one")).to_have_count(2)
        expect(page.locator("#ranks .rank.failed title")).to_have_text("rank 2: silent for 2.50 s")
        expect(page.locator("#ranks .link")).to_have_count(3)
        expect(page.get_by_role("region", name="Ranks").locator("tbody tr").nth(1)).to_contain_text("node1")
        expect(page.get_by_role("region", name="Links").locator("tbody tr").first).to_have_text(re.compile("0 – 1.*40 µs.*3.00 GiB/s.*0 B/s.*2.00 MiB"))
        expect(page.locator("#ranks .note")).to_have_text("Tokens picked without bringing logits together: 95 of 100")
        self.assertNotIn("NaN", page.locator("#ranks").inner_html())
        shown["groups"] = [{**group, "up": False, "ranks": []}]
        expect(page.locator("#ranks .rank.rest")).to_have_count(3)
        expect(page.locator("#ranks .headline")).to_contain_text("being formed")

    def test_the_dashboard_of_several_models(self):
        asked = []

        def change(route):
            asked.append(route.request.url)
            stats = self.server.get("/stats")[1]
            stats["models"] = [{**stats["model"], "id": "small", "loaded": True}, {**stats["model"], "id": "large", "loaded": False}]
            if "model=large" in route.request.url:
                stats["model"] = stats["models"][1]
            route.fulfill(json=stats)

        page = self.open("/dashboard.html", prepare=lambda page: page.route(re.compile("/stats"), change))
        expect(page.locator("#model")).to_have_text("2 models")
        expect(page.locator("#about")).to_have_text(re.compile("^1 loaded"))
        expect(page.locator("#which-model option")).to_have_text(["all 2 models", "small · loaded", "large · not loaded"])
        page.get_by_label("Figures of").select_option("large")
        expect(page.locator("#model")).to_have_text("large")
        expect(page.locator("#about")).to_have_text(re.compile("^not loaded"))
        self.assertTrue(asked[-1].endswith("/stats?model=large"))
