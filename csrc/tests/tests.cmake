# The C++ tests: one binary, built plainly and with each sanitizer. Source paths are relative to csrc.
enable_testing()

set(test_sources
  tests/main.cpp tests/check.cpp tests/guarded.cpp tests/sizes.cpp tests/step.cpp tests/values.cpp
  tests/adam_test.cpp tests/cores_test.cpp tests/float_mode_test.cpp tests/fork_test.cpp tests/half_test.cpp
  tests/isa_test.cpp tests/lion_test.cpp tests/pool_test.cpp tests/ranges_test.cpp tests/roof_test.cpp
  tests/sgd_test.cpp tests/sums_test.cpp)

function(add_test_binary name)
  add_executable(${name} ${kernel_sources} ${test_sources})
  target_compile_options(${name} PRIVATE ${kernel_options} ${ARGN})
  target_link_libraries(${name} PRIVATE Threads::Threads ${ARGN})
endfunction()

# Sanitized code takes several times as long to compile at -O3.
set(sanitized -O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all)
add_test_binary(cpp_tests)
add_test_binary(cpp_tests_address ${sanitized} -fsanitize=address,undefined)
add_test_binary(cpp_tests_thread ${sanitized} -fsanitize=thread)

add_test(NAME plain COMMAND cpp_tests)

add_test(NAME address_and_undefined COMMAND cpp_tests_address)
set_tests_properties(address_and_undefined PROPERTIES ENVIRONMENT
  "ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1;UBSAN_OPTIONS=print_stacktrace=1")

# After a fork, the thread sanitizer keeps the parent's threads on its list, and ends a child whose new thread gets the
# handle of one of them; qemu has a like fault. Under both, the children start no threads (--serial-children).

# The thread sanitizer of GCC 12 ends at once where the system places memory at random over too wide a range.
execute_process(COMMAND setarch -R true RESULT_VARIABLE setarch_failed OUTPUT_QUIET ERROR_QUIET)
if(NOT setarch_failed)
  set(in_place setarch -R)
endif()
add_test(NAME thread COMMAND ${in_place} $<TARGET_FILE:cpp_tests_thread> --serial-children)
set_tests_properties(thread PROPERTIES ENVIRONMENT "TSAN_OPTIONS=halt_on_error=1")

# On emulated processors as well, so that some run chooses, and stands, the code for older ones.
find_program(QEMU qemu-x86_64)
if(QEMU)
  execute_process(COMMAND ${QEMU} --version OUTPUT_VARIABLE qemu_version)
  string(REGEX MATCH "[0-9]+\\.[0-9]+" qemu_version "${qemu_version}")
endif()
if(NOT CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  message(NOTICE "Skipped, since this is no x86-64 processor: the runs on emulated older ones.")
elseif(NOT QEMU OR qemu_version VERSION_LESS 7.2)
  message(NOTICE "Skipped, for want of qemu-x86_64 7.2 or newer (Debian: apt install qemu-user): the runs on emulated "
    "older processors.")
else()
  # Less what qemu does not emulate, and would warn of for every thread. 7.2 is the first that emulates AVX2.
  set(haswell Haswell,-pcid,-x2apic,-tsc-deadline,-hle,-rtm,-invpcid)
  add_test(NAME emulated_with_avx2
    COMMAND ${QEMU} -cpu ${haswell} $<TARGET_FILE:cpp_tests> --expect-isa avx2 --serial-children)
  add_test(NAME emulated_without_avx2
    COMMAND ${QEMU} -cpu Nehalem $<TARGET_FILE:cpp_tests> --expect-isa scalar --serial-children)
endif()
