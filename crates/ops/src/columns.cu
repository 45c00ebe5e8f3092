// out[j] (+)= sum over p of partial[p][j]: the blocks' shares of a parameter's gradient, in the order of the blocks.
extern "C" __global__ void sum_partials(float *out, const float *partial, i64 parts, i64 cols, int add) {
    EACH(j, cols) {
        double sum = 0;
        for (i64 p = 0; p < parts; p++) sum += partial[p * cols + j];
        put(out + j, (float)sum, add);
    }
}
