// Who may ask and how much, without a socket: keys, rates, hosts and origins, addresses, ids, what errors
// say. tests/server/gate.py has the same through a server.
#include "admission.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "addresses.h"
#include "api_error.h"
#include "base/error.h"
#include "ids.h"
#include "json_fields.h"

namespace millrace::server {
namespace {

std::string name_of(const Keys::Key* key) { return key == nullptr ? "" : key->name; }

TEST(Keys, FindsNamesAndNothingElse) {
  const Keys keys = Keys::from_text("# people\nada  sk-1 # hers\n\nsk-22\r\n", "keys");
  EXPECT_EQ(keys.size(), 2u);
  EXPECT_EQ(name_of(keys.check("Bearer sk-1")), "ada");
  EXPECT_EQ(name_of(keys.check("bearer sk-22")), "key-2");
  for (const char* wrong : {"", "Bearer", "Bearer ", "Bearer sk-", "Bearer sk-2", "Bearer sk-222",
                            "Bearer sk-1sk-1", "Basic sk-1", "sk-1"}) {
    EXPECT_EQ(keys.check(wrong), nullptr) << wrong;
  }
  EXPECT_THROW(Keys::from_text("a b c", "keys"), Error);
  EXPECT_THROW(Keys::from_text("# none\n", "keys"), Error);
  EXPECT_FALSE(constant_time_equal("abab", "ab"));
}

TEST(Keys, HaveLimitsOfTheirOwn) {
  const Keys keys =
      Keys::from_text("ada sk-1 rate=5 priority=-3 running=2 tokens=1e3\nsk=22=\nsk-3 rate=0\n", "keys");
  const ClientLimits others{
      .requests_per_minute = 60, .tokens_per_minute = 7, .running = 1, .max_priority = 4};
  const ClientLimits ada = keys.check("Bearer sk-1")->limits(others);
  EXPECT_EQ(ada.requests_per_minute, 5);
  EXPECT_EQ(ada.tokens_per_minute, 1000);
  EXPECT_EQ(ada.running, 2);
  EXPECT_EQ(ada.max_priority, -3);
  const ClientLimits second = keys.check("Bearer sk=22=")->limits(others);
  EXPECT_EQ(second.requests_per_minute, 60);
  EXPECT_EQ(second.max_priority, 4);
  EXPECT_EQ(keys.find("sk-3")->limits(others).requests_per_minute, 0);
  EXPECT_THROW(Keys::from_text("ada sk rate=fast", "keys"), Error);
  EXPECT_THROW(Keys::from_text("ada sk rate=-1", "keys"), Error);
  EXPECT_THROW(Keys::from_text("ada sk speed=1", "keys"), Error);
}

RateLimiter::Clock::time_point seconds_in(double s) {
  return RateLimiter::Clock::time_point() +
         std::chrono::duration_cast<RateLimiter::Clock::duration>(std::chrono::duration<double>(1000 + s));
}

TEST(RateLimiter, AMinuteAtOnceThenTheRate) {
  RateLimiter rate;
  for (int i = 0; i < 60; ++i) EXPECT_TRUE(rate.take("a", 60, 1, seconds_in(0)).allowed);
  const RateLimiter::Verdict refused = rate.take("a", 60, 1, seconds_in(0.5));
  EXPECT_FALSE(refused.allowed);
  EXPECT_NEAR(refused.wait_s, 0.5, 1e-6);
  EXPECT_TRUE(rate.take("b", 60, 1, seconds_in(0.5)).allowed);
  EXPECT_TRUE(rate.take("a", 60, 1, seconds_in(1.1)).allowed);
  EXPECT_FALSE(rate.take("a", 60, 1, seconds_in(1.1)).allowed);
  for (int i = 0; i < 30000; ++i)
    rate.take(std::to_string(i), 60, 1, seconds_in(2));  // bounded, and does not forget what matters now
  EXPECT_TRUE(rate.take("a", 0, 1).allowed);
}

TEST(RateLimiter, ManyAtOnceAreOwed) {
  RateLimiter rate;
  EXPECT_TRUE(rate.take("a", 60, 200, seconds_in(0)).allowed);  // from a full bucket, which then owes 140
  const RateLimiter::Verdict refused = rate.take("a", 60, 1, seconds_in(60));
  EXPECT_FALSE(refused.allowed);
  EXPECT_NEAR(refused.wait_s, 81, 1e-6);
  EXPECT_TRUE(rate.take("a", 60, 1, seconds_in(142)).allowed);
  EXPECT_TRUE(rate.take("b", 60, 30, seconds_in(0)).allowed);
  EXPECT_FALSE(rate.take("b", 60, 31, seconds_in(0)).allowed);
  EXPECT_TRUE(rate.take("b", 60, 30, seconds_in(0)).allowed);
  rate.charge("c", 60, 100, seconds_in(0));
  EXPECT_FALSE(rate.take("c", 60, 0, seconds_in(30)).allowed);
  EXPECT_TRUE(rate.take("c", 60, 0, seconds_in(41)).allowed);
}

TEST(ClientTable, CountsPromptsAndWhatIsUnderWay) {
  ClientTable table;
  const ClientLimits limits{
      .requests_per_minute = 100, .tokens_per_minute = 0, .running = 3, .max_priority = 0};
  ClientTable::Entry first = table.enter("a", limits);
  ASSERT_TRUE(first.use);
  EXPECT_NO_THROW(first.use->count_prompts(50));  // alone: 50 prompts, though three may run
  EXPECT_EQ(table.enter("a", limits).refusal->status, 429);
  EXPECT_TRUE(table.enter("b", limits).use);
  first.use.reset();
  ClientTable::Entry second = table.enter("a", limits), third = table.enter("a", limits);
  ASSERT_TRUE(second.use && third.use);
  EXPECT_THROW(second.use->count_prompts(3), ApiError);
  EXPECT_NO_THROW(second.use->count_prompts(2));
  EXPECT_FALSE(table.enter("a", limits).use);
  second.use.reset();
  third.use.reset();
  ClientTable::Entry last = table.enter("a", limits);
  EXPECT_THROW(last.use->count_prompts(91), ApiError);  // of a hundred a minute some fifty are left
  last.use.reset();
  ClientTable::Entry busy = table.enter("d", limits), sampling = table.enter("d", limits);
  EXPECT_THROW(sampling.use->count_prompts(1, 3), ApiError);  // three answers beside one, where three may run
  EXPECT_NO_THROW(sampling.use->count_prompts(1, 2));
  EXPECT_FALSE(table.enter("d", limits).use);
  const ClientLimits rare{.requests_per_minute = 0.5};
  EXPECT_TRUE(table.enter("c", rare).use);
  EXPECT_EQ(table.enter("c", rare).refusal->status, 429);
}

TEST(ClientTable, ChargesTokens) {
  ClientTable table;
  const ClientLimits limits{.tokens_per_minute = 100};
  ClientTable::Entry first = table.enter("a", limits);
  ASSERT_TRUE(first.use);
  first.use->charge_tokens(90);
  EXPECT_TRUE(table.enter("a", limits).use);
  first.use->charge_tokens(90);
  const ClientTable::Entry second = table.enter("a", limits);
  ASSERT_TRUE(second.refusal);
  std::set<std::string> names;
  for (const auto& [name, value] : second.refusal->headers) names.insert(name);
  EXPECT_TRUE(names.contains("retry-after") && names.contains("x-ratelimit-remaining-tokens"));
}

TEST(AddressCounts, EachAddressHasItsShare) {
  AddressCounts counts(2);
  std::shared_ptr<void> one = counts.enter("10.0.0.1"), two = counts.enter("::ffff:10.0.0.1");
  EXPECT_TRUE(one && two);
  EXPECT_FALSE(counts.enter("10.0.0.1"));
  EXPECT_TRUE(counts.enter("10.0.0.2"));
  one.reset();
  EXPECT_TRUE(counts.enter("10.0.0.1"));
  std::shared_ptr<void> six = counts.enter("2001:db8:1:2::1"), seven = counts.enter("2001:db8:1:2:ffff::9");
  EXPECT_TRUE(six && seven);
  EXPECT_FALSE(counts.enter("2001:db8:1:2::3"));
  EXPECT_TRUE(counts.enter("2001:db8:1:3::3"));
}

TEST(Addresses, AreToldApart) {
  for (const char* yes : {"127.0.0.1", "127.9.8.7", "::1", "::ffff:127.0.0.1"})
    EXPECT_TRUE(is_loopback_address(yes)) << yes;
  for (const char* no : {"128.0.0.1", "127.0.0.1.evil.example", "127.1", "localhost", "", "::2", "0.0.0.0"})
    EXPECT_FALSE(is_loopback_address(no)) << no;
  for (const char* yes : {"10.1.2.3", "172.31.0.1", "192.168.1.1", "fd00::1", "fe80::1%eth0", "::1"})
    EXPECT_TRUE(is_private_address(yes)) << yes;
  for (const char* no : {"8.8.8.8", "172.32.0.1", "2001:db8::1", "x"})
    EXPECT_FALSE(is_private_address(no)) << no;
  EXPECT_TRUE(is_any_address("0.0.0.0") && is_any_address("::"));
  EXPECT_FALSE(is_any_address("::1") || is_any_address("10.0.0.0"));
}

TEST(SiteRules, OnlyNamesThatAreItsOwn) {
  ServerOptions options;
  options.allow_hosts = {"chat.example"};
  const SiteRules rules(options);
  for (const char* yes : {"localhost", "LOCALHOST:8080", "127.0.0.1:1", "127.8.8.8", "[::1]:80",
                          "chat.example", "Chat.Example:443"})
    EXPECT_TRUE(rules.allows_host(yes)) << yes;
  for (const char* no : {"evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "10.0.0.1",
                         "[2001:db8::1]", "xchat.example", "chat.example.", "[", "", ":80"})
    EXPECT_FALSE(rules.allows_host(no)) << no;
  options.host = "0.0.0.0";
  EXPECT_TRUE(SiteRules(options).allows_host("10.0.0.1:8080"));
  EXPECT_TRUE(SiteRules(options).allows_host("[2001:db8::1]:8080"));
  EXPECT_FALSE(SiteRules(options).allows_host("evil.example"));
  options.host = "inside.example";
  EXPECT_TRUE(SiteRules(options).allows_host("inside.example:8080"));
  options.allow_hosts = {"*"};
  EXPECT_TRUE(SiteRules(options).allows_host("evil.example"));
}

TEST(SiteRules, OnlyPagesOfItsOwn) {
  ServerOptions options;
  options.allow_hosts = {"chat.example"};
  const SiteRules rules(options);
  EXPECT_TRUE(rules.allows_origin("http://localhost:8080", "localhost:8080"));
  EXPECT_TRUE(rules.allows_origin("https://chat.example", "127.0.0.1:8080"));  // a proxy changed Host
  for (const char* no :
       {"http://localhost:3000", "https://evil.example", "null", "", "file://", "localhost:8080"})
    EXPECT_FALSE(rules.allows_origin(no, "localhost:8080")) << no;
  options.cors_origin = "https://app.example";
  EXPECT_TRUE(SiteRules(options).allows_origin("https://app.example", "localhost"));
  EXPECT_FALSE(SiteRules(options).allows_origin("https://app.example.evil", "localhost"));
  options.cors_origin = "*";
  EXPECT_TRUE(SiteRules(options).allows_origin("null", "localhost"));
  options.cors_origin = "";
  options.allow_hosts = {"*"};  // any name for the server is not any page
  EXPECT_FALSE(SiteRules(options).allows_origin("https://evil.example", "localhost"));
}

TEST(SiteRules, ABodyIsJson) {
  HttpRequest head;
  EXPECT_FALSE(SiteRules::refuse_content_type(head));
  head.has_body = true;
  EXPECT_EQ(SiteRules::refuse_content_type(head)->status, 415);
  for (const char* good : {"application/json", "Application/JSON; charset=utf-8", "application/json ;x=y"}) {
    head.headers = {{"Content-Type", good}};
    EXPECT_FALSE(SiteRules::refuse_content_type(head)) << good;
  }
  for (const char* bad : {"text/plain", "application/x-www-form-urlencoded", "text/plain; a=application/json",
                          "application/jsonx"}) {
    head.headers = {{"Content-Type", bad}};
    EXPECT_NE(SiteRules::refuse_content_type(head)->body.find("application/json"), std::string::npos) << bad;
  }
}

TEST(Admission, BelievesAProxyOnlyWhenToldTo) {
  ServerOptions options;
  HttpRequest head;
  head.headers = {{"X-Forwarded-For", "1.1.1.1"}, {"X-Forwarded-For", "6.6.6.6, 2.2.2.2"}};
  const auto address = [&](const char* peer) {
    Client client;
    client.remote = peer;
    Admission(options).see_through_proxy(head, client);
    return client.remote;
  };
  EXPECT_EQ(address("127.0.0.1"), "127.0.0.1");
  options.trust_proxy = true;
  EXPECT_EQ(address("127.0.0.1"), "2.2.2.2");
  EXPECT_EQ(address("8.8.8.8"), "8.8.8.8");
  head.headers = {{"X-Forwarded-For", "nobody"}};
  EXPECT_EQ(address("127.0.0.1"), "127.0.0.1");
}

TEST(Ids, AreRandomAndWhole) {
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(new_id("resp_", 32));
  EXPECT_EQ(seen.size(), 1000u);
  std::string digits;
  for (const std::string& id : seen) {
    EXPECT_EQ(id.size(), 37u);
    digits += id.substr(5);
  }
  for (const char c : std::string("0123456789abcdef"))
    EXPECT_NEAR(static_cast<double>(std::count(digits.begin(), digits.end(), c)), 2000, 300) << c;
}

TEST(ApiError, SaysNothingOfWhereFilesAre) {
  EXPECT_EQ(without_paths("/srv/models/a.gguf: found 3, expected 4"), "a.gguf: found 3, expected 4");
  EXPECT_EQ(without_paths("cannot write '/var/cache/x y': no space (/a/b.cpp:12)"),
            "cannot write 'x y': no space (b.cpp:12)");
  EXPECT_EQ(without_paths("kv-dir=/a/b, ../c/d and ~/e"), "kv-dir=b, d and e");
  EXPECT_EQ(without_paths("3 tokens/s, a/b, 1 / 2, and/or"), "3 tokens/s, a/b, 1 / 2, and/or");
  EXPECT_EQ(to_api_error(ErrorCode::kIo, "/a/b: gone").message, "b: gone");
}

}  // namespace
}  // namespace millrace::server
