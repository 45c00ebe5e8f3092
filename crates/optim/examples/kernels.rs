//! Compiles every kernel for the architectures named, without a GPU, and prints what each needs of a multiprocessor.
//!
//! `cargo run -p hymo-optim --features cuda --example kernels -- LIBRARY_FOLDER CACHE_FOLDER ARCH..`, where the first folder
//! holds NVRTC and the second gets the compiled kernels (`-` for none); `cargo xtask kernels` calls this.
#![allow(clippy::print_stdout, clippy::print_stderr)] // a program of its own

use hymo_cuda::{Toolkit, compile};
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, cache, archs @ ..] = &args[..] else {
        eprintln!("usage: kernels LIBRARY_FOLDER CACHE_FOLDER|- ARCH..");
        return ExitCode::FAILURE;
    };
    let cache = (cache != "-").then(|| cache.into());
    let toolkit = Toolkit { libraries: vec![folder.into()], cache };
    let (mut failed, mut modules) = (0, 0);
    println!("{:<8} {:<28} {:>5} {:>6} {:>6} {:>7}  variant", "arch", "kernel", "regs", "spills", "stack", "shared");
    for arch in archs {
        for (source, defines) in hymo_ops::gpu::sources().into_iter().chain(hymo_optim::kernel_sources()) {
            let variant: Vec<String> = defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
            let variant = variant.join(" ");
            modules += 1;
            match compile(&toolkit, &source, &defines, arch) {
                Ok(compiled) => {
                    for r in compiled.resources {
                        let (regs, spills, stack, shared) = (r.registers, r.spills, r.stack, r.shared);
                        println!("{arch:<8} {:<28} {regs:>5} {spills:>6} {stack:>6} {shared:>7}  {variant}", r.kernel);
                    }
                }
                Err(error) => {
                    failed += 1;
                    println!("{arch:<8} {} {variant}\n{error}", source.name);
                }
            }
        }
    }
    println!("{modules} modules, {failed} of them do not compile");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
