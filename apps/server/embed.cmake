# cmake -DOUT=assets_table.cpp -DFILES="/index.html=path;..." -P embed.cmake
# Writes the files as arrays of bytes, with content type and ETag, for assets.h.
set(arrays "")
set(table "")
set(count 0)
foreach(item IN LISTS FILES)
  string(REGEX MATCH "^([^=]+)=(.+)$" matched "${item}")
  set(url "${CMAKE_MATCH_1}")
  set(file "${CMAKE_MATCH_2}")
  file(READ "${file}" hex HEX)
  file(SHA256 "${file}" digest)
  string(SUBSTRING "${digest}" 0 16 digest)
  string(LENGTH "${hex}" digits)
  math(EXPR size "${digits} / 2")
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
  set(type "application/octet-stream")
  foreach(pair "html=text/html; charset=utf-8" "js=text/javascript; charset=utf-8" "mjs=text/javascript; charset=utf-8"
               "css=text/css; charset=utf-8" "json=application/json" "svg=image/svg+xml" "png=image/png"
               "ico=image/x-icon" "woff2=font/woff2" "txt=text/plain; charset=utf-8"
               "webmanifest=application/manifest+json")
    string(REGEX MATCH "^([^=]+)=(.+)$" matched "${pair}")
    if(url MATCHES "\\.${CMAKE_MATCH_1}$")
      string(REGEX REPLACE "^[^=]+=" "" type "${pair}")
    endif()
  endforeach()
  # An empty file still needs an element.
  string(APPEND arrays "const unsigned char kData${count}[] = {${bytes}0};\n")
  string(APPEND table "    {\"${url}\", \"${type}\", \"\\\"${digest}\\\"\", kData${count}, ${size}},\n")
  math(EXPR count "${count} + 1")
endforeach()
file(WRITE "${OUT}" "// Written by embed.cmake.\n#include \"assets.h\"\n\nnamespace millrace::server {\nnamespace {\n${arrays}}  // namespace\n\nconst Asset kAssets[] = {\n${table}};\nconst size_t kNumAssets = ${count};\n\n}  // namespace millrace::server\n")
