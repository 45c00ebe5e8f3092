// Rows of E [V, D] (float) by id; -1 is a row of zeros.
extern "C" __global__ void embedding_fwd(const int *ids, const float *e, i64 e_stride, T *x, i64 rows, i64 cols) {
    EACH(i, rows * cols) {
        int id = ids[i / cols];
        x[i] = narrow<T>(id < 0 ? 0.f : e[id * e_stride + i % cols]);
    }
}

// d_E of the ids that occur, a block each: the positions of id `ids[b]` are order[offsets[b]..offsets[b + 1]], and their rows
// are added in that order.
extern "C" __global__ void embedding_bwd(const int *ids, const int *offsets, const int *order, const T *dx,
                                         i64 dx_stride, float *de, i64 de_stride, i64 cols) {
    int b = blockIdx.x;
    for (i64 j = threadIdx.x; j < cols; j += blockDim.x) {
        float sum = 0;
        for (int p = offsets[b]; p < offsets[b + 1]; p++) sum += widen(dx[order[p] * dx_stride + j]);
        put(de + ids[b] * de_stride + j, sum, 1);
    }
}
