// What names a checkpoint's weights, for caches that outlive the process.
#pragma once

#include <string>

#include "io/checkpoint.h"
#include "model/model.h"

namespace millrace {

// Its layout, and bytes from every tensor: two files with the same name and different weights differ here.
std::string checkpoint_identity(const io::Checkpoint& checkpoint, const ModelConfig& config);

// The same for an adapter: all its numbers, with its scale in them.
std::string adapter_identity(const Adapter& adapter);

}  // namespace millrace
