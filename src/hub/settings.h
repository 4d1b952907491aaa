// Where the hub is and where files go. Functions of this folder throw Error and write nothing to a terminal.
#pragma once

#include <string>

namespace millrace::hub {

struct Settings {
  std::string endpoint = "https://huggingface.co";  // without a slash at the end
  std::string token;                                // empty: none
  std::string cache;                                // the folder of models--owner--name
  bool offline = false;                             // never ask the network
  int connections = 8;                              // at the same time, for one large file
};
// HF_ENDPOINT, HF_TOKEN, HF_TOKEN_PATH, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and XDG_CACHE_HOME, read as the
// `hf` tool reads them.
Settings settings_from_environment();

}  // namespace millrace::hub
