// Two requests at once, the second answered twice: streams of events, read as they come.
#include <iostream>
#include <vector>

#include "millrace/engine.h"

int main(int argc, char** argv) try {
  const auto engine = millrace::Engine::create({.model = argc > 1 ? argv[1] : "", .max_running = 8});
  std::vector<millrace::EventStream> streams;
  streams.push_back(engine->submit({.text = "Once upon a time", .max_tokens = 24}));
  streams.push_back(engine->submit({.text = "The mill by the river",
                                    .sampling = {.temperature = 0.8f, .seed = 7},
                                    .samples = 2,
                                    .max_tokens = 24}));
  for (millrace::EventStream& stream : streams) {
    while (const auto event = stream.next()) {
      std::cout << '[' << stream.id() << '.' << event->sample << "] " << event->text;
      if (event->kind != millrace::Event::Kind::kToken) {
        std::cout << to_string(event->finish) << ' ' << event->error << ", " << event->usage.generated_tokens
                  << " tokens";
      }
      std::cout << '\n';
    }
  }
  engine->shutdown(/*drain=*/true);
  return 0;
} catch (const millrace::Error& error) {
  std::cerr << error.what() << '\n';
  return 2;
}
