//! The text field of a line of JSON.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::Error;

/// What is wrong with a line.
pub enum LineError {
    Json(serde_json::Error),
    NoField { found: Vec<String> },
}

impl LineError {
    pub fn at(self, input: &str, number: u64, field: &str) -> Error {
        let (input, place) = (input.to_owned(), format!("line {number}"));
        match self {
            LineError::Json(error) => {
                // serde counts lines inside the line.
                let said = error.to_string();
                let why = said.split(" at line ").next().unwrap_or_default();
                Error::Read { input, place, why: format!("column {}: {why}", error.column()) }
            }
            LineError::NoField { found } => {
                let found = if found.is_empty() { "none".to_owned() } else { found.join(", ") };
                Error::NoField { input, place, field: field.to_owned(), found }
            }
        }
    }
}

/// The bytes of the field. They need not be UTF-8; `null` and a blank line are an empty text.
pub fn field(line: &[u8], name: &str) -> Result<Vec<u8>, LineError> {
    let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
    if line.trim_ascii().is_empty() {
        return Ok(Vec::new());
    }
    let mut json = serde_json::Deserializer::from_slice(line);
    let object = Object { name };
    let found = json.deserialize_map(object).and_then(|found| json.end().map(|()| found));
    found.map_err(LineError::Json)?.map_err(|found| LineError::NoField { found })
}

struct Object<'n> {
    name: &'n str,
}

impl<'de> Visitor<'de> for Object<'_> {
    /// The text, or the names of the fields that are there.
    type Value = Result<Vec<u8>, Vec<String>>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut text, mut others) = (None, Vec::new());
        while let Some(key) = map.next_key::<String>()? {
            if key == self.name {
                text = Some(map.next_value::<Option<Text>>()?.map_or_else(Vec::new, |text| text.0));
            } else {
                map.next_value::<IgnoredAny>()?;
                if text.is_none() {
                    others.push(key);
                }
            }
        }
        Ok(text.ok_or(others))
    }
}

/// A string as bytes: JSON found in the wild holds bytes that are not UTF-8, and halves of surrogate pairs.
struct Text(Vec<u8>);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Text;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("the text field to be a string")
            }
            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Text, E> {
                Ok(Text(bytes.to_vec()))
            }
            fn visit_byte_buf<E: de::Error>(self, bytes: Vec<u8>) -> Result<Text, E> {
                Ok(Text(bytes))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Text, E> {
                Ok(Text(text.as_bytes().to_vec()))
            }
        }
        deserializer.deserialize_byte_buf(Bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(line: &[u8]) -> Result<Vec<u8>, String> {
        field(line, "text").map_err(|e| e.at("a.jsonl", 7, "text").to_string())
    }

    #[test]
    fn the_field_is_found_wherever_it_stands() {
        assert_eq!(
            said(br#"{"id": [1, {"text": "no"}], "text": "a\nb\u00e9", "z": null}"#).unwrap(),
            "a\nb\u{e9}".as_bytes()
        );
        assert_eq!(said("\u{feff}{\"text\": \"x\"}\r".as_bytes()).unwrap(), b"x");
        assert_eq!(said(br#"{"text": null}"#).unwrap(), b"");
        assert_eq!(said(b" \r").unwrap(), b"");
    }

    #[test]
    fn bytes_outside_utf8_are_kept() {
        assert_eq!(said(b"{\"text\": \"a\xff\xfe\", \"b\": \"\xff\"}").unwrap(), b"a\xff\xfe");
        assert_eq!(said(br#"{"text": "\ud800!"}"#).unwrap(), b"\xed\xa0\x80!");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = said(br#"{"body": "x", "id": 3}"#).unwrap_err();
        assert!(error.starts_with("a.jsonl, line 7: no text field \"text\"; there are body, id"), "{error}");
        assert!(said(b"{}").unwrap_err().contains("there are none"));
        let error = said(br#"{"text": 5}"#).unwrap_err();
        assert!(error.contains("line 7: column ") && error.contains("the text field to be a string"), "{error}");
        assert!(said(br#"{"text": "a"} x"#).unwrap_err().contains("trailing"));
        assert!(said(br#"{"text": "a"#).unwrap_err().contains("EOF"));
        assert!(said(b"[1]").unwrap_err().contains("a JSON object"));
    }
}
