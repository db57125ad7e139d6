// Carries the precompiled header that the modules reuse.
