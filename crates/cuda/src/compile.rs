//! CUDA C++ to a cubin by NVRTC. Needs no GPU.
#![allow(unsafe_code)]

use crate::{Error, Result, Toolkit};
use cudarc::nvrtc::{result, sys};
use sha2::{Digest, Sha256};
use std::ffi::{CString, c_int};
use std::path::Path;
use std::sync::Mutex;

/// CUDA C++ of one module: parts that are compiled as one text, with their names for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The module's name.
    pub name: &'static str,
    /// File names and texts, in order.
    pub parts: &'static [(&'static str, &'static str)],
}

impl Source {
    /// The text that is compiled. `#define`s stand before the last part only: what comes earlier is shared between modules
    /// and may use the same letters for its own template parameters.
    fn text(&self, defines: &[(&str, &str)]) -> String {
        let mut out = String::new();
        for (i, (file, text)) in self.parts.iter().enumerate() {
            if i + 1 == self.parts.len() {
                out.extend(defines.iter().map(|(name, value)| format!("#define {name} {value}\n")));
            }
            out += &format!("#line 1 \"{file}\"\n{text}\n");
        }
        out
    }
}

/// What a kernel needs of a multiprocessor, as the assembler reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resources {
    /// The kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread that went to local memory.
    pub spills: u32,
    /// Bytes of a thread's stack.
    pub stack: u32,
    /// Bytes of shared memory known at compile time.
    pub shared: u32,
}

/// A compiled module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// For one architecture.
    pub cubin: Vec<u8>,
    /// Of each kernel; empty when the module came from the cache.
    pub resources: Vec<Resources>,
}

/// NVRTC is not called from two threads at once: its own locks are then not needed to be right.
static COMPILER: Mutex<()> = Mutex::new(());

/// Compiles `source` for `arch` (`sm_90a`) with `#define`s, or takes it from the toolkit's cache.
///
/// # Errors
/// NVRTC is missing; the source does not compile; the cache cannot be written.
pub fn compile(toolkit: &Toolkit, source: &Source, defines: &[(&str, &str)], arch: &str) -> Result<Compiled> {
    toolkit.nvrtc()?;
    let options = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".to_owned(),
        "--device-int128".to_owned(),
        "--ptxas-options=-v".to_owned(),
    ];
    let text = source.text(defines);
    let file = toolkit.cache.as_deref().map(|folder| folder.join(key(&text, &options)));
    if let Some(cubin) = file.as_deref().and_then(|file| std::fs::read(file).ok()) {
        return Ok(Compiled { cubin, resources: Vec::new() });
    }
    let _one = COMPILER.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let compiled = run(source.name, &text, &options, arch)?;
    if let Some(file) = &file {
        keep(file, &compiled.cubin)?;
    }
    Ok(compiled)
}

/// Name of a module in the cache: all that its bytes depend on.
fn key(text: &str, options: &[String]) -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there (the caller made sure), and both pointers are to integers of this frame.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    let mut hash = Sha256::new();
    hash.update(format!("{major}.{minor}\n{}\n{text}", options.join("\n")));
    let hex: String = hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect();
    format!("{hex}.cubin")
}

/// Written under another name first, so that a reader sees a whole file or none.
fn keep(file: &Path, cubin: &[u8]) -> Result<()> {
    let failed = |e: std::io::Error| Error::Cache { path: file.display().to_string(), problem: e.to_string() };
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    let partial = file.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&partial, cubin).map_err(failed)?;
    std::fs::rename(&partial, file).map_err(failed)
}

fn run(name: &str, text: &str, options: &[String], arch: &str) -> Result<Compiled> {
    let fail = |log: String| Error::Compile { source_name: name.to_owned(), arch: arch.to_owned(), log };
    let c = |s: &str| CString::new(s).map_err(|_| fail("a zero byte in the source".to_owned()));
    let (text, c_name) = (c(text)?, c(&format!("{name}.cu"))?);
    let program = result::create_program(&text, Some(&c_name)).map_err(|e| fail(e.to_string()))?;
    let options = options.iter().map(|o| c(o)).collect::<Result<Vec<_>>>()?;
    let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
    // SAFETY: the program was made above and is not destroyed before the end, the options outlive the call, and every
    // buffer has the size that NVRTC asked for.
    unsafe {
        let status = sys::nvrtcCompileProgram(program, pointers.len() as c_int, pointers.as_ptr());
        let mut size = 0;
        let mut log = Vec::new();
        if sys::nvrtcGetProgramLogSize(program, &mut size) == sys::nvrtcResult::NVRTC_SUCCESS && size > 0 {
            log.resize(size, 0u8);
            sys::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
        }
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        let done = if status == sys::nvrtcResult::NVRTC_SUCCESS {
            let mut size = 0;
            sys::nvrtcGetCUBINSize(program, &mut size);
            let mut cubin = vec![0u8; size];
            sys::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast());
            Ok(Compiled { cubin, resources: resources(&log) })
        } else {
            Err(fail(log))
        };
        result::destroy_program(program).ok();
        done
    }
}

/// Reads the assembler's report.
fn resources(log: &str) -> Vec<Resources> {
    let mut found: Vec<Resources> = Vec::new();
    for line in log.lines() {
        if let Some(at) = line.find("Compiling entry function '") {
            let kernel = line[at + 26..].split('\'').next().unwrap_or_default().to_owned();
            found.push(Resources { kernel, registers: 0, spills: 0, stack: 0, shared: 0 });
            continue;
        }
        let Some(last) = found.last_mut() else { continue };
        let before = |what: &str| -> Option<u32> {
            let at = line.find(what)?;
            line[..at].trim_end().rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
        };
        last.stack = before("bytes stack frame").unwrap_or(last.stack);
        last.spills = before("bytes spill stores").unwrap_or(last.spills);
        last.registers = before("registers").unwrap_or(last.registers);
        last.shared = before("bytes smem").unwrap_or(last.shared);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_assemblers_report() {
        let log = "ptxas info    : Compiling entry function 'k' for 'sm_90a'\nptxas info    : Function properties for k\n    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\nptxas info    : Used 30 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]\n";
        let want = Resources { kernel: "k".into(), registers: 30, spills: 8, stack: 16, shared: 1024 };
        assert_eq!(resources(log), [want]);
    }

    #[test]
    fn parts_keep_their_line_numbers() {
        let source = Source { name: "a", parts: &[("x.cuh", "int a;"), ("y.cu", "int b;")] };
        let want = "#line 1 \"x.cuh\"\nint a;\n#define N 3\n#line 1 \"y.cu\"\nint b;\n";
        assert_eq!(source.text(&[("N", "3")]), want);
    }
}
