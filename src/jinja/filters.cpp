// A filter is of one of two tables.
#include "jinja/filters.h"

#include "jinja/sequence_filters.h"
#include "jinja/text_filters.h"

namespace millrace::jinja {

Native find_filter(std::string_view name) {
  const Native native = find_text_filter(name);
  return native != nullptr ? native : find_sequence_filter(name);
}

}  // namespace millrace::jinja
