// Two requests at once, the second answered twice: streams of events, read as they come.
#include <iostream>
#include <vector>

#include "millrace/engine.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: generate MODEL\n";
    return 2;
  }
  try {
    const auto engine = millrace::Engine::create({.model = argv[1], .max_running = 8});
    std::vector<millrace::Stream> streams;
    streams.push_back(engine->submit({.text = "Once upon a time", .max_tokens = 24}));
    streams.push_back(engine->submit({.text = "The mill by the river",
                                      .sampling = {.temperature = 0.8f, .seed = 7},
                                      .samples = 2,
                                      .max_tokens = 24}));
    for (millrace::Stream& stream : streams) {
      while (const auto event = stream.next()) {
        if (event->kind == millrace::Event::Kind::kToken) {
          std::cout << '[' << stream.id() << '.' << event->sample << ']' << event->text << '\n';
        } else {
          std::cout << '[' << stream.id() << '.' << event->sample << "] " << to_string(event->finish) << ' '
                    << event->error << '\n';
        }
      }
    }
    engine->shutdown(/*drain=*/true);
  } catch (const millrace::Error& error) {
    std::cerr << error.what() << '\n';
    return 2;
  }
  return 0;
}
