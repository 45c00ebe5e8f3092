//! Reference values from public code, made by the scripts in `fixtures/`.

use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::Path;

/// Every tensor of `fixtures/<file>.safetensors`: its dimensions and its elements.
pub fn load(file: &str) -> BTreeMap<String, (Vec<usize>, Vec<f64>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(format!("{file}.safetensors"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let element = |dtype: Dtype, b: &[u8]| {
        let word = b.try_into().unwrap();
        match dtype {
            Dtype::F32 => f64::from(f32::from_le_bytes(word)),
            Dtype::I32 => f64::from(i32::from_le_bytes(word)),
            other => panic!("{file}: dtype {other:?}"),
        }
    };
    let read = |(name, t): (String, safetensors::tensor::TensorView<'_>)| {
        (name, (t.shape().to_vec(), t.data().chunks(4).map(|b| element(t.dtype(), b)).collect()))
    };
    tensors.tensors().into_iter().map(read).collect()
}
