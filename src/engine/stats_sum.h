// Sums of what engines did: of several models, of one model's replicas, and of its engines over the times it
// was loaded.
#pragma once

#include "millrace/stats.h"

namespace millrace {

// Adds counters, gauges and means (by their weight). What belongs to the process, its buffers, is taken once.
void add_stats(EngineStats& sum, const EngineStats& one);
// What stays of an engine that is gone: its counters.
EngineStats counters_of(const EngineStats& stats);

}  // namespace millrace
