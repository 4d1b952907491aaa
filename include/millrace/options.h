// Everything an engine can be told, declared once: the library, the command line and the server all fill in
// this struct and hand it on whole. src/engine/engine_options.h checks it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace millrace {

enum class Speculation {
  kOff,
  kLookup,  // drafts are what followed the same tokens earlier in the request
  kDraft,   // drafts come from a small model with the same vocabulary
};

struct EngineOptions {
  // --- the model and where it runs
  std::string model = {};  // GGUF file or Hugging Face directory
  // cpu, cuda, cuda:1 (another GPU), reference; auto: a GPU if there is one with room for the model, else the
  // CPU (ModelInfo::device_note says why). A model that is larger than a GPU that was named is split: what
  // does not fit is the CPU's. A+B: the same with any two devices.
  std::string device = "cpu";
  // Of a GPU's free memory, how much may be taken; above 1: so many bytes.
  double gpu_memory = 0.9;
  // Of a model that is split: how many of its last layers are the GPU's; -1: as many as fit. Which experts of
  // these layers are the CPU's: so many of each, or a list such as "0-7,12", or "all"; empty: those that do
  // not fit.
  int32_t gpu_layers = -1;
  std::string cpu_experts = {};
  // An importance matrix (millrace calibrate): the experts that its text used most are the GPU's.
  std::string expert_counts = {};
  // "cpu": when the GPU fails under way, requests go on there; empty: they end.
  std::string fallback = {};
  int threads = 0;  // 0: cores, fast cores or hardware threads, whichever read memory fastest
  // Tokens per sequence; 0: what the model was trained for, as far as memory holds it (ModelInfo::context).
  int32_t context = 0;
  std::string kv_type = {};  // f32, f16, bf16, int8, fp8; empty: the device's
  // How layers that see the whole context read it. full: all of it. sparse: each token the pages of it that
  // matter, attention_budget tokens in all. request: full, unless a request says sparse (Request::attention).
  // Only on CPUs.
  std::string attention = "full";
  int32_t attention_budget = 4096;  // tokens, in whole pages of 16; a context that is no longer is read whole
  // How prompts are multiplied. full: as every token. fp8: matrices of layers in E4M3 codes, with a scale for
  // each 128 x 128 weights and 128 activations; what decoding adds, routers and logits stay as they are.
  // Which tokens are computed so follows from their positions in a request: all of its prompt. Blocks
  // computed one way and the other have different names in the cache. On GPUs with Hopper's tensor cores, and
  // slowly on reference; models without experts, states and latent attention.
  std::string compute = "full";
  // The weights, while they are loaded: int8, int4, q4_k, ..., auto; empty: as they are.
  std::string quantize = {};
  // For quantize "auto": what the weights may take, 4.5bpw (bits per weight) or 800M, and a text to measure
  // by (not its name; empty: a built-in one).
  std::string quantize_budget = {}, quantize_sample = {};
  // Low-rank adapters (LoRA), PEFT directories or GGUF files: "name=path" or "name=path:scale". A request
  // names the one it wants (Request::adapter).
  std::vector<std::string> adapters = {};
  // What makes of images what the model reads: a GGUF file for it (llama.cpp's mmproj files). A Hugging Face
  // directory has its own. Empty: no other.
  std::string mmproj = {};
  bool lock = false;  // keep weights and cache in memory: nothing is paged out
  // Processes of mpirun's job that share the model, 1 to 16; each has some rows of every matrix.
  int32_t tensor_parallel = 1;
  // The same with whole layers in each, one behind the other; with tensor_parallel so many stages of so many
  // processes each, which share their stage's rows, 16 in all.
  int32_t pipeline_parallel = 1;
  // With tensor_parallel: each has whole experts, in place of some rows of every expert.
  bool expert_parallel = false;
  // The same with the whole model in each, and a part of every context: its keys and values, and of a prompt
  // its tokens. Not together with the other two.
  int32_t context_parallel = 1;
  // How ranks of a context get one another's keys in a prompt: "ring" (keys and values go round), "mesh"
  // (queries along rows of ranks, keys and values along columns), "wallfacer" (teams share queries, each with
  // a ring of its own) or "auto": what moves the fewest bytes, prompt by prompt. The same bits.
  std::string context_schedule = "auto";
  // Replicas of the model, 1 to 16, each with a cache of its own: a request goes to the one that has most of
  // its prompt. Only on CPUs; with ranks (launcher), each has as many of them.
  int32_t data_parallel = 1;
  // Their speeds, "3,1,1": who is faster gets more of the model; "auto": measured; empty: all alike.
  std::string rank_speeds = {};
  // The command that starts these processes, with options of its own: mpirun. The engine is then outside of
  // their group, and survives it. Empty: this process is one of them.
  std::string launcher = {};
  std::string rank_hosts = {};  // "node1,node2": where they are started, one each (replicas in turn)
  std::string front_address = "127.0.0.1";  // by which they reach this process; a key is asked for there
  bool restart = false;  // what ran when a rank was lost is computed again; else it ends with an error
  bool shrink = false;   // a rank that cannot be started again is left out

  // --- who runs
  int32_t max_running = 64;      // samples in flight
  int32_t max_waiting = 100000;  // requests; more are answered with kBusy
  int32_t step_tokens = 0;       // rows per step: longer prompts go in chunks of this; 0: the device's
  // While others decode, a prompt's chunk takes about so long: what it may delay their tokens by.
  double chunk_s = 0.25;
  double ageing = 0.1;  // levels of priority gained per second of waiting

  // --- the KV cache
  // Tokens the main pool holds, all sequences together; 0: max_running contexts (of 4096 where no context is
  // named, and one whole), or what kv_bytes allows.
  int64_t kv_tokens = 0;
  size_t kv_bytes = 0;  // most memory for the main pool; 0: half of what is available, on a GPU all of it
  bool prefix_cache = true;
  // Of models whose layers have a state: tokens between the states that the prefix cache keeps, beside those
  // at the ends of prompts and answers; a prompt that leaves a known one computes at most so many again.
  // 0: as far apart as to take no more room than the keys and values of the same tokens, 512 to 8192.
  int32_t states_apart = 0;
  size_t ram_tier_bytes = 0;  // blocks that left the main pool: preempted or cached; 0: no such tier
  std::string kv_dir = {};    // blocks on disk, found again after a restart; empty: no such tier
  size_t kv_dir_bytes = size_t{8} << 30;

  // --- drafts
  Speculation speculation = Speculation::kOff;
  std::string draft_model = {};  // for kDraft
  int32_t max_draft = 8;         // tokens

  std::function<void(size_t done, size_t total)> on_load = {};  // bytes
};

}  // namespace millrace
