// Code for the vector instructions of the CPU at hand, in a portable binary.
#pragma once

/// Before a function whose loops are to be compiled once per instruction set; the loader chooses. Every clone rounds
/// alike as long as nothing is contracted (-ffp-contract=off) or reassociated. Off under sanitizers: the resolvers
/// would run before the sanitizer has started.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TRIREME_VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TRIREME_VECTORISED
#endif
