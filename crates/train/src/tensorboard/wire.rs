//! The bytes of an event file: the few protobuf messages that are needed, and the frames that they stand in.
//!
//! Field numbers are those of TensorFlow's `event.proto`, `summary.proto`, `tensor.proto` and `types.proto`.

use crc::{CRC_32_ISCSI, Crc};

const CRC32C: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// A protobuf message while it grows. Fields stand in the order in which they are added.
#[derive(Debug, Default)]
pub(super) struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u64, wire_type: u64) {
        self.varint(field << 3 | wire_type);
    }

    /// A zero is left out, as proto3 has it.
    pub(super) fn int(mut self, field: u64, value: u64) -> Self {
        if value != 0 {
            self.key(field, 0);
            self.varint(value);
        }
        self
    }

    /// A zero is left out.
    pub(super) fn double(mut self, field: u64, value: f64) -> Self {
        if value != 0. {
            self.key(field, 1);
            self.0.extend(value.to_le_bytes());
        }
        self
    }

    /// Written in any case: these are alternatives of each other, and one of them is always there.
    pub(super) fn float(mut self, field: u64, value: f32) -> Self {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(super) fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.key(field, 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    pub(super) fn message(self, field: u64, value: &Message) -> Self {
        self.bytes(field, &value.0)
    }

    /// As it stands in a file: the length, the length's checksum, the message, its checksum.
    pub(super) fn framed(&self) -> Vec<u8> {
        let len = (self.0.len() as u64).to_le_bytes();
        [&len[..], &masked_crc(&len).to_le_bytes(), &self.0, &masked_crc(&self.0).to_le_bytes()].concat()
    }
}

/// The checksum as the format keeps it: rotated and moved, so that a checksum of bytes that hold checksums is no weaker.
pub(super) fn masked_crc(bytes: &[u8]) -> u32 {
    CRC32C.checksum(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// What an event says beside its time and step.
#[derive(Debug)]
pub(super) enum What {
    /// First in every file.
    Version,
    /// Everything from the event's step on that was read before is void.
    Begin,
    /// Values by tag.
    Values(Vec<(String, Value)>),
}

/// A value of a tag.
#[derive(Debug)]
pub(super) enum Value {
    Scalar(f32),
    /// Markdown.
    Text(String),
}

/// An `Event`.
pub(super) fn event(time: f64, step: u64, what: &What) -> Message {
    let event = Message::default().double(1, time).int(2, step);
    match what {
        What::Version => event.bytes(3, b"brain.Event:2"),
        // SessionLog, whose status START is 1.
        What::Begin => event.message(7, &Message::default().int(1, 1)),
        What::Values(values) => {
            let summary = values
                .iter()
                .fold(Message::default(), |summary, (tag, value)| summary.message(1, &summary_value(tag, value)));
            event.message(5, &summary)
        }
    }
}

/// A `Summary.Value`.
fn summary_value(tag: &str, value: &Value) -> Message {
    let tagged = Message::default().bytes(1, tag.as_bytes());
    match value {
        Value::Scalar(value) => tagged.float(2, *value),
        Value::Text(text) => {
            // A tensor of dtype 7 (string) with an empty shape, and metadata that name the plugin and class 2 (tensor).
            let tensor = Message::default().int(1, 7).message(2, &Message::default()).bytes(8, text.as_bytes());
            let plugin = Message::default().bytes(1, b"text");
            let metadata = Message::default().message(1, &plugin).int(4, 2);
            tagged.message(8, &tensor).message(9, &metadata)
        }
    }
}
