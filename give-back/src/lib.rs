//! Gives memory back to the kernel: freed heap, code that nobody runs, and what calls have left below the stack. And has
//! one heap for all threads.
//!
//! **Heap.** The C library's allocator keeps what was freed below anything that is still in use, for ever: after 15,000
//! streams a few small blocks near the end held 280 MB. `malloc_trim(3)` walks the free lists and gives back every
//! whole page. No crate wraps it safely, and the call has nothing to get wrong: a number goes in, and it takes the
//! allocator's own locks; nor has `mallopt(3)`. Where the C library is another this does nothing.
//!
//! **Code.** Whatever ran once stays mapped, and counts as resident, for as long as the process lives, with the 64 KB
//! that the kernel maps around each page it needs. Unmapped by `madvise(2)`, the pages stay in the page cache, and what
//! is still used is mapped again at its next use. The segments come from `dl_iterate_phdr(3)`, as no crate gives both
//! them and a safe call for it: `findshlibs` is not kept any more and leaves the call to us.
//!
//! **Stack.** The deepest call of the start leaves its pages to the main thread for ever, 124 KB of which 20 are in use
//! later. Below the frame that asks nothing lives, so they may go by `madvise(2)`, too; the next deep call gets empty ones.

use std::ffi::{c_int, c_void};
use std::ops::Range;

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    // Documented as safe for threads; it changes only memory that nobody owns.
    safe fn malloc_trim(pad: usize) -> c_int;
    // Takes numbers; one that it does not know it refuses.
    safe fn mallopt(parameter: c_int, value: c_int) -> c_int;
}

/// Gives back every page of the heap that is free, and tells whether there was one. Takes milliseconds for a heap of
/// some ten megabytes, in which other threads may wait for memory.
pub fn heap() -> bool {
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
    const MOST: c_int = -8;
    #[cfg(target_env = "gnu")]
    return mallopt(MOST, 1) != 0;
    #[cfg(not(target_env = "gnu"))]
    false
}

/// Unmaps the code and the constants of the program and its libraries, and tells how many bytes their segments have.
/// Left out is where the process has pages of its own, as where a debugger or the kernel's probes have set a
/// breakpoint. Each page that is used again costs a fault of about a microsecond, for 64 KB at once.
#[inline(never)]
pub fn code() -> usize {
    let Ok(smaps) = std::fs::read_to_string("/proc/self/smaps") else { return 0 };
    let mut all = All { changed: changed(&smaps), page: page(), bytes: 0 };
    // SAFETY: the callback is called before this returns, with the pointer to `all` that it expects.
    unsafe { libc::dl_iterate_phdr(Some(unmap), (&raw mut all).cast()) };
    all.bytes
}

/// What the functions that are called from [`stack`] may have on it, and more.
const BELOW: usize = 16 * 1024;

/// Gives back what lies below the main thread's stack, and tells how many bytes that may be; nothing on another thread,
/// whose stack the kernel does not tell from what is mapped beside it.
#[inline(never)]
pub fn stack() -> usize {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return 0 };
    let here = 0u8;
    let here = std::hint::black_box(&raw const here).addr();
    let Some(start) = main_stack(&maps).filter(|stack| stack.contains(&here)).map(|stack| stack.start) else {
        return 0;
    };
    let bytes = (here.saturating_sub(BELOW) & !(page() - 1)).saturating_sub(start);
    // SAFETY: the range is of this thread's stack, which grows downwards, and ends below every frame that is in use: below
    // that of this function by more than those it calls need. Nobody else knows what lies there.
    let given = bytes > 0 && unsafe { libc::madvise(start as *mut c_void, bytes, libc::MADV_DONTNEED) } == 0;
    if given { bytes } else { 0 }
}

/// Where it is (proc_pid_maps(5)).
fn main_stack(maps: &str) -> Option<Range<usize>> {
    let line = maps.lines().find(|line| line.ends_with("[stack]"))?;
    addresses(line.split_whitespace().next()?)
}

fn addresses(text: &str) -> Option<Range<usize>> {
    let (from, to) = text.split_once('-')?;
    let hex = |digits: &str| usize::from_str_radix(digits, 16).ok();
    Some(hex(from)?..hex(to)?)
}

struct All {
    changed: Vec<Range<usize>>,
    page: usize,
    bytes: usize,
}

fn page() -> usize {
    // SAFETY: a number of the system is asked for.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The mappings with pages that are not the file's any more (proc_pid_smaps(5)).
fn changed(smaps: &str) -> Vec<Range<usize>> {
    let (mut all, mut at) = (Vec::new(), 0..0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            // Those in memory, and those in the swap space.
            (Some("Anonymous:" | "Swap:"), Some(kilobytes))
                if kilobytes != "0" && all.last() != Some(&at) =>
            {
                all.push(at.clone());
            }
            (Some(first), _) => {
                if let Some(mapping) = addresses(first) {
                    at = mapping;
                }
            }
            _ => {}
        }
    }
    all
}

/// Of one program or library. The loader holds its lock meanwhile, so none of them goes away.
unsafe extern "C" fn unmap(of: *mut libc::dl_phdr_info, _size: usize, all: *mut c_void) -> c_int {
    // SAFETY: both are valid for the time of the call: the loader's description, and what `code` handed over.
    let (of, all) = unsafe { (&*of, &mut *all.cast::<All>()) };
    // SAFETY: the loader gives the headers with their number; a name, where there is one, is a text that ends.
    let (headers, kernels_own) = unsafe {
        let headers = std::slice::from_raw_parts(of.dlpi_phdr, usize::from(of.dlpi_phnum));
        let name = (!of.dlpi_name.is_null()).then(|| std::ffi::CStr::from_ptr(of.dlpi_name));
        (headers, name.is_some_and(|name| name.to_bytes().starts_with(b"linux-")))
    };
    if kernels_own {
        return 0;
    }
    for header in
        headers.iter().filter(|header| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0)
    {
        // Addresses fit: the segment is in memory.
        let start = (of.dlpi_addr as usize).wrapping_add(header.p_vaddr as usize);
        let end = start.wrapping_add(header.p_memsz as usize).next_multiple_of(all.page);
        let start = start & !(all.page - 1);
        if all.changed.iter().any(|own| own.start < end && start < own.end) {
            continue;
        }
        // SAFETY: nobody may write to the segment, and no page of it is the process's own (relocated constants lie in a
        // segment that may be written to), so what its file holds is what the process sees after this, too.
        if unsafe { libc::madvise(start as *mut c_void, end - start, libc::MADV_DONTNEED) } == 0 {
            all.bytes += end - start;
        }
    }
    0
}

#[cfg(test)]
mod tests {
    // Constants enough to be seen.
    static TABLE: [u8; 1 << 20] = [7; 1 << 20];

    fn resident_file_bytes() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssFile:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }

    fn sum() -> u64 {
        std::hint::black_box(&TABLE).iter().map(|byte| u64::from(*byte)).sum()
    }

    #[test]
    fn mappings_with_pages_of_their_own_are_told() {
        let smaps = "5581-5582 r-xp 00000000 fe:00 1 /a-b/x\nRss: 4 kB\nAnonymous:          0 kB\nVmFlags: rd ex\n\
                     5582-5590 r--p 00001000 fe:00 1 /a\nAnonymous:          4 kB\nSwap: 0 kB\n";
        assert_eq!(super::changed(smaps), vec![0x5582..0x5590]);
        let away = "5581-5582 r-xp 0 fe:00 1 /a\nAnonymous:          0 kB\nShared_Hugetlb:     4 kB\nSwap:               4 kB\n\
                    SwapPss:            4 kB\n5582-5590 r--p 0 fe:00 1 /a\nAnonymous: 4 kB\nSwap: 8 kB\n";
        assert_eq!(
            super::changed(away),
            vec![0x5581..0x5582, 0x5582..0x5590],
            "in the swap space they are its own, too"
        );
        assert_eq!(super::changed("no such thing\nAnonymous: \n"), vec![]);
    }

    #[test]
    fn the_stack_of_the_main_thread_is_found_and_no_other() {
        let maps = "5581-5582 r-xp 00000000 fe:00 1 /a [stack]/b\n7ffd0000-7ffd2000 rw-p 00000000 00:00 0          [stack]\n";
        assert_eq!(super::main_stack(maps), Some(0x7ffd_0000..0x7ffd_2000));
        assert_eq!(super::main_stack("5581-5582 rw-p 00000000 00:00 0 [heap]\n"), None);
        // Tests run in threads of their own.
        assert_eq!(super::stack(), 0);
    }

    #[test]
    fn code_and_constants_are_unmapped_and_come_back() {
        let before = sum();
        let mapped = resident_file_bytes();
        assert!(super::code() > TABLE.len());
        let left = resident_file_bytes();
        assert!(left + TABLE.len() as u64 / 2 < mapped, "{mapped} bytes before, {left} after");
        assert_eq!(sum(), before);
    }
}
