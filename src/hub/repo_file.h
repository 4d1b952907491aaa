// A file of a repository of the hub.
#pragma once

#include <cstdint>
#include <string>

namespace millrace::hub {

struct RepoFile {
  std::string path;       // in the repository
  uint64_t size = 0;      // bytes
  std::string sha256;     // of files in LFS; else empty
  std::string blob_sha1;  // git's name of the content, of the others
};

}  // namespace millrace::hub
