// The file of a tuning table: where it lies, how it is written and what is checked when it is read.
#include "backend/tuning.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "backend/backend.h"
#include "base/error.h"
#include "base/mapped_file.h"

namespace millrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kWhat = "millrace tuning";
constexpr int kFileVersion = 1;

std::string cache_directory() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && cache[0] == '/') {
    return std::string(cache) + "/millrace";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && home[0] == '/') {
    return std::string(home) + "/.cache/millrace";
  }
  throw_error(ErrorCode::kBadInput,
              "the tuning file: found neither XDG_CACHE_HOME nor HOME as an absolute path, expected one of "
              "them");
}

// Letters, digits and dots; everything else is one underscore.
std::string name_part(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool upper = c >= 'A' && c <= 'Z';
    const bool kept = upper || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.';
    if (kept) {
      out += upper ? static_cast<char>(c - 'A' + 'a') : c;
    } else if (!out.empty() && out.back() != '_') {
      out += '_';
    }
  }
  return out;
}

const Json& child(const Json& object, const char* name) {
  const auto at = object.find(name);
  if (at == object.end()) throw_error(ErrorCode::kBadInput, "found no \"{}\"", name);
  return *at;
}
template <class T>
T field(const Json& object, const char* name) {
  return child(object, name).get<T>();
}

TuningEntry entry_of(const Json& object) {
  TuningEntry entry;
  entry.what = field<std::string>(object, "what");
  entry.key.kernel = field<std::string>(object, "kernel");
  entry.key.format = field<std::string>(object, "format");
  entry.key.outputs = field<int64_t>(object, "outputs");
  entry.key.cols = field<int64_t>(object, "columns");
  entry.key.rows = field<int64_t>(object, "rows");
  entry.choice = field<std::string>(object, "choice");
  for (const auto& [name, us] : child(object, "us").items()) {
    entry.times.push_back({name, us.get<double>()});
  }
  return entry;
}

}  // namespace

std::string tuning_file(const TuningTarget& target) {
  return fmt::format("{}/tune-{}-{}.json", cache_directory(), name_part(target.device),
                     name_part(target.driver));
}

std::string tuning_text(const TuningTable& table) {
  Json entries = Json::array();
  for (const TuningEntry& entry : table.entries) {
    Json us = Json::object();
    for (const TuningTime& time : entry.times) us[time.candidate] = std::round(time.us * 100.0) / 100.0;
    entries.push_back({{"what", entry.what},
                       {"kernel", entry.key.kernel},
                       {"format", entry.key.format},
                       {"outputs", entry.key.outputs},
                       {"columns", entry.key.cols},
                       {"rows", entry.key.rows},
                       {"choice", entry.choice},
                       {"us", us}});
  }
  const Json file = {{"file", kWhat},
                     {"version", kFileVersion},
                     {"device", table.target.device},
                     {"driver", table.target.driver},
                     {"build", table.target.build},
                     {"entries", entries}};
  return file.dump(1) + "\n";
}

TuningTable parse_tuning(const std::string& text, const std::string& path) {
  try {
    const Json file = Json::parse(text);
    if (field<std::string>(file, "file") != kWhat || field<int>(file, "version") != kFileVersion) {
      throw_error(ErrorCode::kBadInput, "found no tuning table of version {}", kFileVersion);
    }
    TuningTable table;
    table.target = {field<std::string>(file, "device"), field<std::string>(file, "driver"),
                    field<std::string>(file, "build")};
    for (const Json& entry : child(file, "entries")) table.entries.push_back(entry_of(entry));
    return table;
  } catch (const Json::exception& error) {
    throw_error(ErrorCode::kBadInput, "{}: not a tuning file: {}", path, error.what());
  } catch (const Error& error) {
    throw_error(ErrorCode::kBadInput, "{}: not a tuning file: {}", path, error.what());
  }
}

TuningTable merge_tuning(const TuningTable& old, const TuningTable& made) {
  TuningTable all = made;
  if (!(old.target == made.target)) return all;
  for (const TuningEntry& entry : old.entries) {
    const auto same = [&](const TuningEntry& other) { return other.key == entry.key; };
    if (std::none_of(made.entries.begin(), made.entries.end(), same)) all.entries.push_back(entry);
  }
  return all;
}

void write_tuning(const TuningTable& table, const std::string& path) {
  const std::filesystem::path directory = std::filesystem::path(path).parent_path();
  std::error_code failure;
  std::filesystem::create_directories(directory, failure);
  if (failure) throw_error(ErrorCode::kIo, "{}: cannot be made: {}", directory.string(), failure.message());
  const std::string text = tuning_text(table);
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

std::string load_tuning(Backend& backend) {
  const std::optional<TuningTarget> target = backend.tuning_target();
  if (!target) return {};
  try {
    const std::string path = tuning_file(*target);
    if (!std::filesystem::exists(path)) return {};
    const TuningTable table = parse_tuning(read_text_file(path), path);
    if (!(table.target == *target)) {
      return fmt::format(
          "{}: tuned for {}, driver {}, {}; this is {}, driver {}, {}: built-in choices are used "
          "(`millrace tune` makes a new one)",
          path, table.target.device, table.target.driver, table.target.build, target->device, target->driver,
          target->build);
    }
    backend.use_tuning(table);
    return {};
  } catch (const std::exception& error) {
    return fmt::format("{}: built-in choices are used (`millrace tune` makes a new file)", error.what());
  }
}

}  // namespace millrace
