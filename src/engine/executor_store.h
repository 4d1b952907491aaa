// ExecutorStore: the main pool's bytes for kv::Cache, moved by the executor that owns them.
#pragma once

#include "backend/backend.h"
#include "kv/block_store.h"

namespace millrace {

class ExecutorStore final : public kv::BlockStore {
 public:
  explicit ExecutorStore(Executor& executor) : executor_(&executor) {}
  void use(Executor& executor) { executor_ = &executor; }
  void read(int group, int32_t block, std::span<std::byte> to) override {
    executor_->read_block(group, block, to);
  }
  void write(int group, int32_t block, std::span<const std::byte> from) override {
    executor_->write_block(group, block, from);
  }
  void copy(int group, int32_t from, int32_t to) override { executor_->copy_block(group, from, to); }
  void finish() override { executor_->finish_reads(); }

 private:
  Executor* executor_;
};

}  // namespace millrace
