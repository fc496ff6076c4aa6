//! The floating-point modes of a thread: the arithmetic's bits belong to the default ones, which round to nearest and keep subnormals.
//!
//! A caller may have set others (`torch.set_flush_denormal`, a library built with -ffast-math, an audio host), and a thread starts with the modes of the
//! one that started it, so that a pool's workers may have them, too. Each piece of work on floats therefore runs in [`with_default`], on whatever thread.

/// Runs `work` in the default modes; the thread's own are back afterwards, also if `work` panics.
pub(crate) fn with_default<T>(work: impl FnOnce() -> T) -> T {
    let _own = Own::replace();
    apart(work)
}

/// A call that the compiler does not look into: no operation of `work` moves in front of the change of modes, or behind the change back.
#[inline(never)]
fn apart<T>(work: impl FnOnce() -> T) -> T {
    work()
}

/// Modes of the thread that are not the default ones, to be put back.
struct Own(Option<register::Modes>);

impl Own {
    fn replace() -> Self {
        let modes = register::read();
        if register::is_default(modes) {
            return Own(None);
        }
        // SAFETY: these are the modes that Rust's floats have everywhere.
        unsafe { register::write(register::DEFAULT) };
        Own(Some(modes))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if let Some(modes) = self.0 {
            // SAFETY: the thread had these modes when it called, so they are its caller's choice; no float is computed between here and the return to it
            // but by the code that was computing in them.
            unsafe { register::write(modes) };
        }
    }
}

/// MXCSR: the modes, and in its lowest six bits what has happened since they were cleared.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod register {
    use std::arch::asm;

    pub type Modes = u32;

    /// All exceptions masked, rounding to nearest, subnormals as they are.
    pub const DEFAULT: Modes = 0x1f80;

    const HAPPENED: Modes = 0x3f;

    pub fn is_default(modes: Modes) -> bool {
        modes & !HAPPENED == DEFAULT
    }

    pub fn read() -> Modes {
        let mut modes = 0;
        // SAFETY: writes the four bytes of `modes`, and nothing else.
        unsafe { asm!("stmxcsr [{}]", in(reg) &mut modes, options(nostack, preserves_flags)) };
        modes
    }

    /// # Safety
    /// The modes are the default ones, or those in which the thread came.
    pub unsafe fn write(modes: Modes) {
        // SAFETY: reads the four bytes of `modes`, which are a value that the register had, or its default: no reserved bit is set. The caller's contract
        // has the rest.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &modes, options(nostack)) };
    }
}

/// FPCR.
#[cfg(all(target_arch = "aarch64", not(miri)))]
mod register {
    use std::arch::asm;

    pub type Modes = u64;

    /// No exception traps, rounding to nearest, subnormals as they are.
    pub const DEFAULT: Modes = 0;

    pub fn is_default(modes: Modes) -> bool {
        modes == DEFAULT
    }

    pub fn read() -> Modes {
        let modes;
        // SAFETY: reads a register that every program may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) modes, options(nomem, nostack, preserves_flags)) };
        modes
    }

    /// # Safety
    /// The modes are the default ones, or those in which the thread came.
    pub unsafe fn write(modes: Modes) {
        // SAFETY: a value that the register had, or its default. The caller's contract has the rest. Memory counts as touched, so that nothing is moved
        // across.
        unsafe { asm!("msr fpcr, {}", in(reg) modes, options(nostack)) };
    }
}

/// Machines whose modes are not looked at, and Miri, which has no assembly.
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod register {
    pub type Modes = ();

    pub const DEFAULT: Modes = ();

    pub fn is_default((): Modes) -> bool {
        true
    }

    pub fn read() -> Modes {}

    /// # Safety
    /// None is asked for.
    pub unsafe fn write((): Modes) {}
}
