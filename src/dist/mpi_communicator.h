// The communicator between processes and hosts, over Open MPI. The library is opened when it is asked for, so
// that a program built with it starts on machines without: there, and in a build without mpi.h, asking is an
// Error.
#pragma once

#include "dist/communicator.h"
#include "dist/job_watch.h"

namespace millrace::dist {

// Was this process started by mpirun, srun or their like? Looks at the environment only.
bool started_by_mpi();
// The rank that they gave it; 0 without them.
int launched_rank();

// All processes of the job. The last communicator of it that goes ends MPI for this process, and it waits
// there for the others; a rank that fails under way calls abort_mpi instead. Once per process.
std::unique_ptr<Communicator> make_mpi_world();

// Notes between the processes of the job, from a thread of its own; once make_mpi_world has returned, and
// until its last communicator goes. None where this MPI takes calls of one thread at a time only.
std::unique_ptr<Post> make_mpi_post();

// Ends every process of the job, if there is one: for a rank that cannot go on, also from another
// thread than that which calls MPI. Returns if MPI was not started.
void abort_mpi(int status) noexcept;

// "Open MPI v4.1.4", or why there is none.
std::string describe_mpi();

}  // namespace millrace::dist
