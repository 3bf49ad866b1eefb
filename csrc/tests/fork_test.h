// For tools that cannot follow a process of several threads through a fork.
#pragma once

namespace zofftk::tests {

void keep_children_serial();  // forked children use the pool without starting threads

}  // namespace zofftk::tests
