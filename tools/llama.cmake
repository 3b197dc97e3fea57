# llama.cpp reads this when its project begins: the library of its own programs is not built, as nothing here uses it.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "" FORCE)
