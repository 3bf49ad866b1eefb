#include <pybind11/pybind11.h>
PYBIND11_MODULE(_cpu_adam, m) { m.doc() = "CPU Adam"; }
