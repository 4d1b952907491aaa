#include "engine/sample_state.h"

namespace millrace {

Sample::Sample(std::shared_ptr<Job> owner, int32_t which, Sampler own_sampler)
    : job(std::move(owner)), index(which), sampler(std::move(own_sampler)), text(*job) {
  if (job->request.constraint) constraint = job->request.constraint->clone();
}

void Sample::reserve(size_t capacity, Speculation speculation, int32_t max_draft) {
  const auto drafts = static_cast<size_t>(max_draft);
  tokens.reserve(capacity + drafts + 1);
  picked.reserve(drafts + 1);
  if (speculation != Speculation::kOff) draft.tokens.reserve(drafts);
  if (speculation == Speculation::kLookup) draft.lookup.reserve(capacity);
}

}  // namespace millrace
