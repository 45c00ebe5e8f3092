//! The byte alphabet of byte-level BPE: every byte stands as one printable character in tokenizer.json.
//!
//! Printable bytes stand for themselves, the others for the characters from U+0100 on, in order (GPT-2's table, which the
//! `tokenizers` crate keeps private). Ids of the bytes follow the order of these characters.

/// Whether the byte stands for itself.
const fn printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The character of each byte.
pub const CHAR: [char; 256] = {
    let mut table = ['\0'; 256];
    let (mut byte, mut next) = (0, 0x100_u32);
    while byte < 256 {
        table[byte] = if printable(byte as u8) {
            byte as u8 as char
        } else {
            next += 1;
            match char::from_u32(next - 1) {
                Some(c) => c,
                None => unreachable!(),
            }
        };
        byte += 1;
    }
    table
};

/// The bytes in the order of their ids.
pub const BY_ID: [u8; 256] = {
    let (mut table, mut id) = ([0; 256], 0);
    let mut pass = 0;
    while pass < 2 {
        let mut byte = 0;
        while byte < 256 {
            if printable(byte as u8) == (pass == 0) {
                table[id] = byte as u8;
                id += 1;
            }
            byte += 1;
        }
        pass += 1;
    }
    table
};

/// The id of each byte.
pub const ID: [u32; 256] = {
    let (mut table, mut id) = ([0; 256], 0);
    while id < 256 {
        table[BY_ID[id] as usize] = id as u32;
        id += 1;
    }
    table
};

/// The token's text in tokenizer.json.
pub fn to_text(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| CHAR[byte as usize]).collect()
}

/// The bytes that a token's text in tokenizer.json stands for; `None` if a character stands for no byte.
pub fn to_bytes(text: &str) -> Option<Vec<u8>> {
    text.chars()
        .map(|c| match c as u32 {
            code @ 0..=0xFF if printable(code as u8) => Some(code as u8),
            0x100.. => (0..=255).find(|&byte| CHAR[byte as usize] == c),
            _ => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_that_of_the_crate() {
        let ours: std::collections::BTreeSet<char> = CHAR.into_iter().collect();
        let theirs = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        assert_eq!(ours, theirs.into_iter().collect());
        assert_eq!((CHAR[b' ' as usize], CHAR[b'\n' as usize]), ('\u{120}', '\u{10A}'));
        let ordered: Vec<char> = BY_ID.iter().map(|&byte| CHAR[byte as usize]).collect();
        assert!(ordered.is_sorted(), "ids follow the characters");
    }

    #[test]
    fn every_byte_comes_back() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(to_bytes(&to_text(&all)), Some(all));
        assert_eq!(to_bytes("a b"), None);
        assert_eq!(to_bytes("\u{4000}"), None);
        assert!((0..256).all(|id| ID[BY_ID[id] as usize] as usize == id));
    }
}
