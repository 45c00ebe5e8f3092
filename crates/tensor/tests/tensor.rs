//! Views, sharing and the pool.

use hymo_tensor::{Ctx, DType, Error, Tensor, par};
use proptest::prelude::*;

fn counting(ctx: &Ctx, dims: &[usize]) -> Tensor {
    let n = dims.iter().product::<usize>();
    Tensor::from_slice(ctx, dims, &(0..n).map(|i| i as f32).collect::<Vec<_>>()).unwrap()
}

#[test]
fn views_share_and_writing_needs_the_only_handle() {
    let ctx = Ctx::cpu();
    let mut x = counting(&ctx, &[2, 3, 4]);
    assert_eq!((x.rows(), x.cols(), x.numel(), x.bytes(), x.dtype()), (6, 4, 24, 96, DType::F32));
    let cols = x.slice_cols(1..3).unwrap();
    assert_eq!(cols.dims(), [2, 3, 2]);
    assert_eq!(cols.slice_rows(1..3).unwrap().to_vec::<f32>().unwrap(), [5., 6., 9., 10.]);
    assert!(!cols.is_contiguous() && matches!(cols.flat::<f32>(), Err(Error::NotContiguous { .. })));
    assert!(cols.reshape(&[6, 2]).is_ok() && cols.reshape(&[12]).is_err());
    assert!(matches!(x.view_mut::<f32>(), Err(Error::Shared { .. })));
    let copy = cols.copy(&ctx).unwrap();
    drop(cols);
    x.view_mut::<f32>().unwrap().row_mut(0)[1] = 77.;
    assert_eq!(copy.to_vec::<f32>().unwrap()[0], 1.);
}

#[test]
fn errors_name_what_is_wrong() {
    let ctx = Ctx::cpu();
    let x = counting(&ctx, &[2, 3]);
    let says = |e: Error| e.to_string();
    assert_eq!(says(x.view::<i32>().unwrap_err()), "view: tensor is f32, want i32");
    assert_eq!(says(x.expect("op", "x", &[3, 2]).unwrap_err()), "op: x has shape [2, 3], want [3, 2]");
    assert_eq!(says(x.slice_cols(2..4).unwrap_err()), "slice_cols: range is 2..4, want inside 0..3");
    assert_eq!(says(x.slice_flat(4, &[3]).unwrap_err()), "slice_flat: dims is [3] at 4, want inside 6 elements");
    assert!(Tensor::from_vec(&[2, usize::MAX], vec![0f32]).is_err() && ctx.empty::<f32>(&[]).is_err());
    assert!(ctx.empty_real(DType::I32, &[1]).is_err());
}

#[test]
fn dropped_buffers_are_used_again() {
    let ctx = Ctx::cpu();
    for _ in 0..3 {
        let (a, b) = (ctx.empty::<f32>(&[100, 10]).unwrap(), ctx.empty::<f32>(&[990]).unwrap());
        assert!(a.is_unique() && b.is_unique());
    }
    let stats = ctx.pool().stats();
    assert_eq!((stats.live, stats.fresh), (0, stats.peak), "the second round allocated nothing");
    let poisoned = ctx.clone().poisoned().empty::<f32>(&[1000]).unwrap();
    assert!(poisoned.to_vec::<f32>().unwrap().iter().all(|x| x.is_nan()));
    ctx.pool().reset_peak();
    assert_eq!(ctx.pool().stats().peak, ctx.pool().stats().live);
}

#[test]
fn empty_tensors_have_no_rows() {
    let ctx = Ctx::cpu();
    for dims in [[0, 3], [3, 0]] {
        let mut x = ctx.zeros::<f32>(&dims).unwrap();
        assert_eq!(x.view::<f32>().unwrap().rows(), 0);
        assert_eq!(x.view_mut::<f32>().unwrap().grid(2, 2).len(), 0);
        assert!(x.to_vec::<f32>().unwrap().is_empty());
    }
}

proptest! {
    /// Tiles cover every element exactly once, whatever the sizes, also of a strided view.
    #[test]
    fn grids_cover_everything_once(rows in 1usize..20, cols in 1usize..20, rb in 1usize..8, cb in 1usize..8, pad in 0usize..3) {
        let ctx = Ctx::cpu();
        let mut x = ctx.zeros::<f32>(&[rows, cols + pad]).unwrap();
        let (left, _) = x.view_mut::<f32>().unwrap().split_cols(cols);
        par::each(left.grid(rb, cb), |_, mut tile| {
            for i in 0..tile.rows() {
                tile.row_mut(i).iter_mut().for_each(|v| *v += 1.);
            }
        });
        for row in x.to_vec::<f32>().unwrap().chunks(cols + pad) {
            prop_assert!(row[..cols].iter().all(|&v| v == 1.) && row[cols..].iter().all(|&v| v == 0.));
        }
    }
}
