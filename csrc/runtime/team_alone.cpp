// The team where there are no threads: WebAssembly.
#include "runtime/team.h"

void tarnn::run_job(const std::shared_ptr<Job>& job) { job->work(0, Team::Member(job->team, 0)); }

/// What a thread would do at its end: the only one has none.
extern "C" int __cxa_thread_atexit(void (*)(void*), void*, void*) { return 0; }
