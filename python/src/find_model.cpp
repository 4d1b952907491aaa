#include "find_model.h"

#include "base/error.h"
#include "cli/model_names.h"
#include "errors.h"
#include "hub/hub.h"

namespace nb = nanobind;

namespace millrace::python {
namespace {

std::string fetch(const hub::ModelName& name, const hub::Settings& settings) {
  if (settings.offline) {
    throw_error(ErrorCode::kBadInput, "{}: is not in {} and HF_HUB_OFFLINE is set", name.text(),
                settings.cache);
  }
  if (const std::string why = hub::why_no_network(); !why.empty()) {
    throw_error(ErrorCode::kUnsupported,
                "{}: is not in {}: fetch it with `millrace pull {}` or `hf download`", name.text(),
                settings.cache, name.text());
  }
  const nb::gil_scoped_release unlocked;
  const hub::PullPlan plan = hub::plan_pull(name, settings);
  const std::optional<std::string> path = hub::pull(plan, settings, [](const hub::PullProgress&) {
    const nb::gil_scoped_acquire gil;
    check_signals();
    return true;
  });
  return path.value();  // it is not stopped by the callback, which throws
}

}  // namespace

FoundModel find_model(const std::string& given) {
  const std::optional<hub::ModelName> name = cli::hub_name(given);
  if (!name) return {given, cli::model_title(given)};
  const hub::Settings settings = hub::settings_from_environment();
  std::string path = cli::find_on_this_machine(given, *name, settings);
  return {path.empty() ? fetch(*name, settings) : path, cli::model_title(given)};
}

}  // namespace millrace::python
