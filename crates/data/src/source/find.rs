//! Which files the arguments of a command stand for.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How documents stand in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// The whole file is one document.
    Text,
    /// A JSON object a line.
    JsonLines,
    /// A column of a Parquet file.
    Parquet,
}

/// How a file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// Not at all.
    None,
    /// gzip.
    Gzip,
    /// Zstandard.
    Zstd,
}

/// One file to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// Its path; `None` is standard input.
    pub path: Option<PathBuf>,
    /// Its path as given, or `-`.
    pub name: String,
    /// How documents stand in it.
    pub format: Format,
    /// How it is compressed.
    pub compression: Compression,
    /// Its size on disk, 0 for standard input.
    pub bytes: u64,
}

/// The files to read, in their order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inputs {
    /// The files.
    pub files: Vec<Input>,
    /// Files in folders that were left out because they are not text.
    pub skipped: Vec<PathBuf>,
}

impl Inputs {
    /// Finds the files that arguments name: files, folders, patterns (`data/**/*.txt`), `-` for standard input.
    ///
    /// # Errors
    /// An argument that names nothing, or a file named twice.
    pub fn find(arguments: &[String], stdin: Format) -> Result<Self> {
        let mut inputs = Inputs::default();
        for argument in arguments {
            inputs.add(argument, stdin)?;
        }
        let mut seen = HashSet::new();
        if let Some(twice) = inputs.files.iter().find(|input| !seen.insert(&input.path)) {
            return Err(Error::NoInput { input: twice.name.clone(), why: "named twice: its text would count double" });
        }
        Ok(inputs)
    }

    fn add(&mut self, argument: &str, stdin: Format) -> Result<()> {
        let path = Path::new(argument);
        let before = self.files.len();
        if argument == "-" {
            let (name, compression) = ("-".to_owned(), Compression::None);
            self.files.push(Input { path: None, name, format: stdin, compression, bytes: 0 });
        } else if path.is_dir() {
            self.add_folder(path)?;
            if self.files.len() == before {
                return Err(Error::NoInput { input: argument.into(), why: "a folder without text" });
            }
        } else if path.exists() {
            self.add_file(path)?;
        } else {
            self.add_pattern(argument)?;
            if self.files.len() == before {
                let why = "no such file or folder, and no file matches it as a pattern";
                return Err(Error::NoInput { input: argument.into(), why });
            }
        }
        Ok(())
    }

    fn add_file(&mut self, path: &Path) -> Result<()> {
        let bytes = fs::metadata(path).map_err(Error::io("read", path))?.len();
        let (format, compression) = by_name(path);
        let name = path.to_string_lossy().into_owned();
        self.files.push(Input { path: Some(path.to_owned()), name, format, compression, bytes });
        Ok(())
    }

    fn add_folder(&mut self, folder: &Path) -> Result<()> {
        let walk = ignore::WalkBuilder::new(folder)
            // What is read depends on the folder alone, not on who reads it.
            .parents(false)
            .git_global(false)
            .git_exclude(false)
            .require_git(false)
            .sort_by_file_path(|a, b| a.as_os_str().cmp(b.as_os_str()))
            .build();
        for entry in walk {
            let entry = entry.map_err(|e| Error::Read {
                input: folder.display().to_string(),
                place: "walking it".into(),
                why: e.to_string(),
            })?;
            if !entry.file_type().is_some_and(|kind| kind.is_file()) {
                continue;
            }
            match by_name(entry.path()) {
                (Format::Text, Compression::None) if binary(entry.path())? => self.skipped.push(entry.into_path()),
                _ => self.add_file(entry.path())?,
            }
        }
        Ok(())
    }

    fn add_pattern(&mut self, pattern: &str) -> Result<()> {
        // The crate gives paths in order.
        let Ok(paths) = glob::glob(pattern) else { return Ok(()) };
        for path in paths {
            let path = path.map_err(|e| Error::Io { action: "read", path: e.path().to_owned(), source: e.into() })?;
            if path.is_file() {
                self.add_file(&path)?;
            }
        }
        Ok(())
    }

    /// The name of an input.
    #[must_use]
    pub fn name(&self, input: usize) -> &str {
        self.files.get(input).map_or("?", |file| &file.name)
    }

    /// Bytes on disk, all files together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

fn by_name(path: &Path) -> (Format, Compression) {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let (stem, compression) = match name.rsplit_once('.') {
        Some((stem, "gz")) => (stem, Compression::Gzip),
        Some((stem, "zst" | "zstd")) => (stem, Compression::Zstd),
        _ => (&*name, Compression::None),
    };
    let format = match stem.rsplit_once('.') {
        Some((_, "jsonl" | "ndjson")) => Format::JsonLines,
        Some((_, "parquet")) if compression == Compression::None => Format::Parquet,
        _ => Format::Text,
    };
    (format, compression)
}

/// Whether a NUL byte stands near the beginning, as git asks too.
fn binary(path: &Path) -> Result<bool> {
    let mut head = Vec::new();
    let file = File::open(path).map_err(Error::io("open", path))?;
    file.take(8000).read_to_end(&mut head).map_err(Error::io("read", path))?;
    Ok(head.contains(&0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(inputs: &Inputs, root: &Path) -> Vec<String> {
        let inside = |input: &Input| {
            let path = input.path.as_ref().unwrap().strip_prefix(root).unwrap();
            path.to_str().unwrap().replace('\\', "/")
        };
        inputs.files.iter().map(inside).collect()
    }

    #[test]
    fn folders_files_and_patterns() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for (name, content) in [
            ("b.txt", &b"text"[..]),
            ("a/z.rs", b"fn z() {}"),
            ("a/x.png", b"\x89PNG\0\0"),
            ("a/built/out.txt", b"left out"),
            ("a/.hidden", b"left out"),
            ("a/.gitignore", b"built/\n"),
            ("c.jsonl.zst", b"\0\0"),
            ("empty.md", b""),
        ] {
            fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
            fs::write(root.join(name), content).unwrap();
        }
        let find = |arguments: &[&str]| {
            let arguments: Vec<String> = arguments.iter().map(|a| root.join(a).display().to_string()).collect();
            Inputs::find(&arguments, Format::Text)
        };
        let all = find(&["."]).unwrap();
        let stripped: Vec<String> = names(&all, root).iter().map(|n| n.trim_start_matches("./").to_owned()).collect();
        assert_eq!(stripped, ["a/z.rs", "b.txt", "c.jsonl.zst", "empty.md"]);
        assert_eq!(all.skipped.len(), 1);
        assert_eq!(names(&find(&["b.txt", "a/x.png"]).unwrap(), root), ["b.txt", "a/x.png"], "named is read");
        assert_eq!(names(&find(&["**/*.rs", "*.txt"]).unwrap(), root), ["a/z.rs", "b.txt"]);
        assert!(find(&["none.txt"]).unwrap_err().to_string().contains("no such file or folder"));
        assert!(find(&["b.txt", "*.txt"]).unwrap_err().to_string().contains("named twice"));
        fs::create_dir(root.join("void")).unwrap();
        assert!(find(&["void"]).unwrap_err().to_string().contains("a folder without text"));
    }

    #[test]
    fn formats_by_name() {
        for (name, format, compression) in [
            ("a.txt", Format::Text, Compression::None),
            ("README", Format::Text, Compression::None),
            ("a.JSONL", Format::JsonLines, Compression::None),
            ("a.ndjson.gz", Format::JsonLines, Compression::Gzip),
            ("a.jsonl.zst", Format::JsonLines, Compression::Zstd),
            ("a.txt.gz", Format::Text, Compression::Gzip),
            ("a.parquet", Format::Parquet, Compression::None),
        ] {
            assert_eq!(by_name(Path::new(name)), (format, compression), "{name}");
        }
    }
}
