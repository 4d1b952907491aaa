// Why a model is not there, in the words that clients read.
#pragma once

#include <string>

#include "api_error.h"
#include "base/error.h"
#include "model_set.h"

namespace millrace::server {

// A reason as clients may read it: files are called by the name of their model.
std::string public_reason(std::string text, const ModelSpec& spec);
ApiError load_error(const ModelSpec& spec, ErrorCode code, const std::string& reason);
ApiError busy_error(const ModelSpec& spec, const std::string& why);  // `why`: what is too little
ApiError stopping_error();

}  // namespace millrace::server
