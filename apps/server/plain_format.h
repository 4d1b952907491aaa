// The simplest chat format: the model's own template, its whole answer is content.
#pragma once

#include <memory>

#include "chat/format.h"
#include "constraints.h"

namespace millrace::server {

std::unique_ptr<chat::Format> make_plain_format(const Engine& engine, Constraints& constraints);

}  // namespace millrace::server
