// The cores that threads of the pool are bound to. Linux; elsewhere nothing is bound.
#pragma once
#include <thread>
#include <vector>

namespace zofftk {

void choose_cores(const std::vector<int>& cores);  // for all threads bound from now on; none: those of who makes them
void bind_to_cores(std::thread& thread);           // a thread that the system will not bind so stays as it is

}  // namespace zofftk
