//! The oracle, then the fast path. Both turn forwards and backwards by one function.

use super::{Angles, Args};
use hymo_tape::GradSlot;
use hymo_tensor::{Ctx, Mat, MatMut, Real, Result, Tensor, each};

pub(super) fn oracle<T: Real>(ctx: &Ctx, x: &Tensor, angles: &Angles, args: Args) -> Result<Tensor> {
    let mut y = ctx.empty::<T>(x.dims())?;
    oracle_turn(y.view_mut::<T>()?, false, x.view::<T>()?, angles, args, 1.);
    Ok(y)
}

pub(super) fn oracle_backward<T: Real>(
    ctx: &Ctx,
    angles: &Angles,
    d_y: &Tensor,
    args: Args,
    d_x: &mut GradSlot<'_>,
) -> Result<()> {
    if let Some((d_x, add)) = d_x.target::<T>(ctx)? {
        oracle_turn(d_x, add, d_y.view::<T>()?, angles, args, -1.);
    }
    Ok(())
}

/// Turns by the angles times `sign`.
fn oracle_turn<T: Real>(mut y: MatMut<'_, T>, add: bool, x: Mat<'_, T>, angles: &Angles, args: Args, sign: f64) {
    let content = args.head_dim - angles.rope().d_rope;
    for n in 0..x.rows() {
        let (x, y, turn) = (x.row(n), y.row_mut(n), angles.at(n));
        for j in 0..x.len() {
            let (head, d) = (j / args.head_dim * args.head_dim, j % args.head_dim);
            let value = if d < content {
                x[j]
            } else {
                let pair = (d - content) / 2;
                let (cos, sin) = (T::of(turn[2 * pair]), T::of(sign * turn[2 * pair + 1]));
                let u = head + content + 2 * pair;
                if (d - content) % 2 == 0 { x[u] * cos - x[u + 1] * sin } else { x[u + 1] * cos + x[u] * sin }
            };
            y[j] = value + if add { y[j] } else { T::zero() };
        }
    }
}

/// Rows in a block of work.
const ROWS: usize = 64;

pub(super) fn forward(ctx: &Ctx, x: &Tensor, angles: &Angles, args: Args) -> Result<Tensor> {
    let mut y = ctx.empty::<f32>(x.dims())?;
    turn(y.view_mut::<f32>()?, false, x.view::<f32>()?, angles, args, 1.);
    Ok(y)
}

pub(super) fn backward(ctx: &Ctx, angles: &Angles, d_y: &Tensor, args: Args, d_x: &mut GradSlot<'_>) -> Result<()> {
    if let Some((d_x, add)) = d_x.target::<f32>(ctx)? {
        turn(d_x, add, d_y.view::<f32>()?, angles, args, -1.);
    }
    Ok(())
}

fn turn(y: MatMut<'_, f32>, add: bool, x: Mat<'_, f32>, angles: &Angles, args: Args, sign: f32) {
    let (d_rope, d) = (angles.rope().d_rope, args.head_dim);
    each!(y.row_blocks(ROWS), |b, mut y| {
        let mut angle = vec![0f32; d_rope];
        for i in 0..y.rows() {
            let n = b * ROWS + i;
            // Rounded once a token, then used by all of its heads.
            for (to, from) in angle.chunks_exact_mut(2).zip(angles.at(n).chunks_exact(2)) {
                (to[0], to[1]) = (from[0] as f32, sign * from[1] as f32);
            }
            for (y, x) in y.row_mut(i).chunks_exact_mut(d).zip(x.row(n).chunks_exact(d)) {
                let ((y_n, y_r), (x_n, x_r)) = (y.split_at_mut(d - d_rope), x.split_at(d - d_rope));
                if add {
                    y_n.iter_mut().zip(x_n).for_each(|(y, &x)| *y += x);
                    pairs(y_r, x_r, &angle, |y, v| *y += v);
                } else {
                    y_n.copy_from_slice(x_n);
                    pairs(y_r, x_r, &angle, |y, v| *y = v);
                }
            }
        }
    });
}

#[inline(always)]
fn pairs(y: &mut [f32], x: &[f32], angle: &[f32], put: impl Fn(&mut f32, f32)) {
    for ((y, x), a) in y.chunks_exact_mut(2).zip(x.chunks_exact(2)).zip(angle.chunks_exact(2)) {
        put(&mut y[0], x[0] * a[0] - x[1] * a[1]);
        put(&mut y[1], x[1] * a[0] + x[0] * a[1]);
    }
}
