//! Gives freed memory back to the kernel, and has one heap for all threads.
//!
//! The C library's allocator keeps what was freed below anything that is still in use, for ever: after 15,000
//! streams a few small blocks near the end held 280 MB. `malloc_trim(3)` walks the free lists and gives back every
//! whole page. No crate wraps it safely, and the call has nothing to get wrong: a number goes in, and it takes the
//! allocator's own locks; nor has `mallopt(3)`. Where the C library is another this does nothing.

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    // Documented as safe for threads; it changes only memory that nobody owns.
    safe fn malloc_trim(pad: usize) -> std::ffi::c_int;
    // Takes numbers; one that it does not know it refuses.
    safe fn mallopt(parameter: std::ffi::c_int, value: std::ffi::c_int) -> std::ffi::c_int;
}

/// Gives back every page that is free, and tells whether there was one. Takes milliseconds for a heap of some
/// ten megabytes, in which other threads may wait for memory.
pub fn give_back() -> bool {
    #[cfg(target_env = "gnu")]
    return malloc_trim(0) != 0;
    #[cfg(not(target_env = "gnu"))]
    false
}

/// All threads share one heap from now on, but those that have one of their own already. Tells whether the C library
/// took the setting.
pub fn one_arena() -> bool {
    /// `M_ARENA_MAX` of `malloc.h`.
    #[cfg(target_env = "gnu")]
    const MOST: std::ffi::c_int = -8;
    #[cfg(target_env = "gnu")]
    return mallopt(MOST, 1) != 0;
    #[cfg(not(target_env = "gnu"))]
    false
}
