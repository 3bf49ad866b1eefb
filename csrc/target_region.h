// Opens and closes a region of a source file whose functions may use more instructions than the baseline. All shared
// headers come before the region: an inline function of theirs compiled inside it could be the copy the linker keeps
// for everybody, and crash older processors.
#pragma once

#define ZOFFTK_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define ZOFFTK_TARGET_BEGIN(features) \
  ZOFFTK_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define ZOFFTK_TARGET_END ZOFFTK_PRAGMA(clang attribute pop)
#else
#define ZOFFTK_TARGET_BEGIN(features) ZOFFTK_PRAGMA(GCC push_options) ZOFFTK_PRAGMA(GCC target(features))
#define ZOFFTK_TARGET_END ZOFFTK_PRAGMA(GCC pop_options)
#endif

#define ZOFFTK_INLINE static inline __attribute__((always_inline))
