#include "grammar/string_formats.h"

#include <map>
#include <string>

namespace millrace::grammar {
namespace {

std::map<std::string_view, std::string> make_patterns() {
  const std::string year = "(?:[1-9]\\d{3}|0[1-9]\\d\\d|00[1-9]\\d|000[1-9])";
  const std::string leap_year =
      "(?:(?:[1-9]\\d|0[1-9])(?:0[48]|[2468][048]|[13579][26])|00(?:0[48]|[2468][048]|[13579][26])|"
      "(?:0[48]|[2468][048]|[13579][26])00)";
  const std::string date = "(?:" + year +
                           "-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|"
                           "(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|02-(?:0[1-9]|1\\d|2[0-8]))|" +
                           leap_year + "-02-29)";
  const std::string time =
      "(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,9})?(?:Z|[+-](?:[01]\\d|2[0-3]):[0-5]\\d)";
  const std::string byte = "(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)";
  const std::string ipv4 = byte + "(?:\\." + byte + "){3}";
  const std::string h16 = "[0-9A-Fa-f]{1,4}";
  const std::string atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]";
  // Single hyphens, inside: never the "--" that marks an encoded name. Four labels of 60 stay within the 253
  // characters of a name.
  const std::string host = "(?:[A-Za-z0-9]{1,60}|[A-Za-z0-9]{1,15}(?:-[A-Za-z0-9]{1,14}){1,3})";
  const std::string path_char = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})";
  std::string ipv6 = "(?:" + h16 + ":){7}" + h16 + "|::(?:" + h16 + "(?::" + h16 + "){0,5})?";
  for (int before = 1; before <= 6; ++before) {
    ipv6 += "|" + h16 + "(?::" + h16 + "){" + std::to_string(before - 1) + "}::(?:" + h16;
    ipv6 += before == 6 ? ")?" : "(?::" + h16 + "){0," + std::to_string(5 - before) + "})?";
  }
  return {
      {"date", date},
      {"time", time},
      {"date-time", date + "T" + time},
      {"duration",
       "P(?:\\d{1,9}W|(?:\\d{1,9}Y(?:\\d{1,9}M(?:\\d{1,9}D)?)?|\\d{1,9}M(?:\\d{1,9}D)?|\\d{1,9}D)"
       "(?:T(?:\\d{1,9}H(?:\\d{1,9}M(?:\\d{1,9}S)?)?|\\d{1,9}M(?:\\d{1,9}S)?|\\d{1,9}S))?|"
       "T(?:\\d{1,9}H(?:\\d{1,9}M(?:\\d{1,9}S)?)?|\\d{1,9}M(?:\\d{1,9}S)?|\\d{1,9}S))"},
      {"email", atom + "{1,32}(?:\\." + atom + "{1,31})?@" + host + "(?:\\." + host + "){1,2}"},
      {"hostname", host + "(?:\\." + host + "){0,3}"},
      {"ipv4", ipv4},
      {"ipv6", ipv6},
      {"uuid", "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"},
      {"uri", "[A-Za-z][A-Za-z0-9+.-]{0,15}://" + host + "(?:\\." + host + "){0,3}(?::[1-9]\\d{0,3})?(?:/" +
                  path_char + "*)*(?:\\?(?:" + path_char + "|[/?])*)?(?:#(?:" + path_char + "|[/?])*)?"},
      {"json-pointer", "(?:/(?:[^~/]|~[01])*)*"},
  };
}

}  // namespace

std::string_view format_pattern(std::string_view format) {
  static const auto* const patterns = new std::map<std::string_view, std::string>(make_patterns());
  const auto it = patterns->find(format);
  return it != patterns->end() ? std::string_view(it->second) : std::string_view();
}

}  // namespace millrace::grammar
