// Heads of `dim` columns, the last `turn` of which turn as pairs (2i, 2i + 1). angles [N, turn]: cosine and sine of each pair.
// sign 1 turns forwards, -1 backwards. A thread a column.
extern "C" __global__ void rotary(const T *x, i64 x_stride, const float *angles, T *y, i64 y_stride, int add, i64 rows,
                                  i64 cols, i64 dim, i64 turn, float sign) {
    EACH(i, rows * cols) {
        Split at(i, cols);
        i64 n = at.row, j = at.col, d = (int)j % (int)dim - (dim - turn);
        const T *row = x + n * x_stride;
        float value = widen(row[j]);
        if (d >= 0) {
            float cosine = angles[n * turn + d / 2 * 2], sine = sign * angles[n * turn + d / 2 * 2 + 1];
            float other = widen(row[d % 2 == 0 ? j + 1 : j - 1]);
            value = d % 2 == 0 ? value * cosine - other * sine : value * cosine + other * sine;
        }
        put(y + n * y_stride + j, value, add);
    }
}
