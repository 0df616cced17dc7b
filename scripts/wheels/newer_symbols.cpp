// What the headers of newer systems use, and those of 2018 lack: `c++` beside this file links it into each library.

extern "C" {

// glibc 2.32: whether the process has one thread. 0: reference counts are always counted as among threads.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

[[noreturn]] void __cxa_throw_bad_array_new_length();
}

namespace std {

// GCC 11's libstdc++: by the function that GCC 4.9's has for the same
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { __cxa_throw_bad_array_new_length(); }

}  // namespace std
