// JSON in and out of templates: the render's variables become values, and tojson is Python's json.dumps.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "jinja/value.h"

namespace millrace::jinja {

Value from_json(const nlohmann::ordered_json& json, int depth = 0);
Value filter_tojson(RenderState& state, const Value& self, const Arguments& arguments);

}  // namespace millrace::jinja
