//! One column of strings of a Parquet file.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use parquet::basic::Type;
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::{Input, Raw, ReadOptions};
use crate::{Error, Result};

/// Rows decoded at once.
const AT_ONCE: usize = 256;

/// The rows' texts; rows without one are empty.
pub fn rows<'a>(
    input: &Input,
    options: &ReadOptions,
    read: &'a AtomicU64,
) -> Result<impl Iterator<Item = Result<Raw>> + use<'a>> {
    let name = input.name.clone();
    let path = input.path.as_deref().unwrap_or(Path::new("-"));
    let file = File::open(path).map_err(Error::io("open", path))?;
    let broken = |e: ParquetError| Error::Read { input: input.name.clone(), place: "its footer".into(), why: say(&e) };
    let reader = SerializedFileReader::new(file).map_err(broken)?;
    let column = column(&reader, &input.name, &options.text_field)?;
    let max = options.max_bytes;
    let mut rows = Rows { reader, column, group: 0, open: None, left: 0, ready: Vec::new().into_iter(), row: 0, read };
    let mut failed = false;
    Ok(std::iter::from_fn(move || {
        if failed {
            return None;
        }
        let text = match rows.next() {
            Ok(text) => text?,
            Err(error) => {
                failed = true;
                let place = format!("row group {}, after row {}", rows.group, rows.row);
                return Some(Err(Error::Read { input: name.clone(), place, why: say(&error) }));
            }
        };
        Some(Ok(if text.len() as u64 > max { Raw::TooLong } else { Raw::Text(text) }))
    }))
}

fn say(error: &ParquetError) -> String {
    match error {
        ParquetError::General(why) | ParquetError::EOF(why) | ParquetError::NYI(why) => why.clone(),
        other => other.to_string(),
    }
}

/// The index of the column, which must hold at most one string a row.
fn column(reader: &SerializedFileReader<File>, input: &str, field: &str) -> Result<usize> {
    let schema = reader.metadata().file_metadata().schema_descr();
    let names: Vec<String> = schema.columns().iter().map(|column| column.path().string()).collect();
    let (input, place) = (input.to_owned(), "its schema".to_owned());
    let Some(index) = names.iter().position(|name| name == field) else {
        return Err(Error::NoField { input, place, field: field.to_owned(), found: names.join(", ") });
    };
    let column = schema.column(index);
    if column.physical_type() != Type::BYTE_ARRAY || column.max_rep_level() > 0 {
        let why = format!("column {field:?} holds {} values, not one string a row", column.physical_type());
        return Err(Error::Read { input, place, why });
    }
    Ok(index)
}

struct Rows<'a> {
    reader: SerializedFileReader<File>,
    column: usize,
    group: usize,
    open: Option<parquet::column::reader::ColumnReaderImpl<parquet::data_type::ByteArrayType>>,
    left: i64,
    ready: std::vec::IntoIter<Vec<u8>>,
    row: u64,
    read: &'a AtomicU64,
}

impl Rows<'_> {
    fn next(&mut self) -> Result<Option<Vec<u8>>, ParquetError> {
        loop {
            if let Some(text) = self.ready.next() {
                self.row += 1;
                return Ok(Some(text));
            }
            if self.left > 0 {
                self.decode()?;
            } else if !self.next_group()? {
                return Ok(None);
            }
        }
    }

    fn next_group(&mut self) -> Result<bool, ParquetError> {
        if self.group == self.reader.num_row_groups() {
            return Ok(false);
        }
        let group = self.reader.get_row_group(self.group)?;
        self.left = group.metadata().num_rows();
        // The group's bytes, as part of the file's: other columns are not read.
        self.read.fetch_add(group.metadata().compressed_size().max(0) as u64, Ordering::Relaxed);
        match group.get_column_reader(self.column)? {
            ColumnReader::ByteArrayColumnReader(reader) => self.open = Some(reader),
            _ => return Err(ParquetError::General("the column's type changes between row groups".into())),
        }
        self.group += 1;
        Ok(true)
    }

    fn decode(&mut self) -> Result<(), ParquetError> {
        let Some(reader) = &mut self.open else { return Ok(()) };
        let (mut levels, mut values) = (Vec::<i16>::new(), Vec::<ByteArray>::new());
        let (rows, n_values, _) = reader.read_records(AT_ONCE, Some(&mut levels), None, &mut values)?;
        if rows == 0 {
            return Err(ParquetError::EOF(format!("{} rows are missing", self.left)));
        }
        self.left -= rows as i64;
        let texts: Vec<Vec<u8>> = if n_values == rows {
            values.into_iter().map(|value| value.data().to_vec()).collect()
        } else {
            // A level below the largest is a null, for which there is no value.
            let largest = levels.iter().copied().max().filter(|_| n_values > 0);
            let mut values = values.into_iter();
            let text = |&level: &i16| {
                let value = if Some(level) == largest { values.next() } else { None };
                value.map_or_else(Vec::new, |value| value.data().to_vec())
            };
            levels.iter().map(text).collect()
        };
        self.ready = texts.into_iter();
        Ok(())
    }
}
