#include "find_model.h"

#include "base/error.h"
#include "cli/model_names.h"
#include "errors.h"
#include "hub/http_client.h"
#include "hub/model_name.h"
#include "hub/puller.h"
#include "hub/settings.h"

namespace nb = nanobind;

namespace millrace::python {
namespace {

std::string fetch(const hub::ModelName& name, const hub::Settings& settings, const nb::object& progress) {
  if (settings.offline) {
    throw_error(ErrorCode::kBadInput, "{}: is not in {} and HF_HUB_OFFLINE is set", name.text(),
                settings.cache);
  }
  const nb::gil_scoped_release unlocked;
  const hub::PullPlan plan = hub::plan_pull(name, settings);
  const std::optional<std::string> path = hub::pull(plan, settings, [&](const hub::PullProgress& so_far) {
    const nb::gil_scoped_acquire gil;
    check_signals();
    if (!progress.is_none()) progress(so_far.done, so_far.total);
    return true;
  });
  return path.value();  // it is not stopped by the callback, which throws
}

}  // namespace

FoundModel find_model(const std::string& given, const nb::object& progress) {
  const std::optional<hub::ModelName> name = cli::hub_name(given);
  if (!name) return {given, cli::model_title(given)};
  const hub::Settings settings = hub::settings_from_environment();
  std::string path = cli::find_on_this_machine(given, *name, settings);
  return {path.empty() ? fetch(*name, settings, progress) : path, cli::model_title(given)};
}

}  // namespace millrace::python
