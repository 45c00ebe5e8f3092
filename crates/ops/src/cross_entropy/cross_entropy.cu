// A block a row of a chunk's logits (float): its loss in double, and d_l in T, which may be the logits' own memory.
// targets: -1 is ignored, its d_l zero. found [rows][3]: nll, lse, whether the target's logit was the largest.
DEVICE float capped(float x, float cap) { return cap > 0 ? cap * tanhf(x / cap) : x; }

extern "C" __global__ void cross_entropy(const float *logits, T *dl, const int *targets, double *found, i64 v,
                                         double scale, double zeta, float cap, int want) {
    __shared__ float part[33];
    __shared__ double sums[33];
    i64 i = blockIdx.x;
    const float *l = logits + i * v;
    T *out = dl + i * v;
    int y = targets[i];
    if (y < 0) {
        if (want)
            for (i64 j = threadIdx.x; j < v; j += blockDim.x) out[j] = narrow<T>(0.f);
        if (threadIdx.x < 3) found[3 * i + threadIdx.x] = 0;
        return;
    }
    // A running maximum and the sum under it, each thread its own; a NaN or an infinity reaches the loss through `poison`,
    // whatever the maximum passes over.
    float own = -INFINITY, under = 0, poison = 0;
    auto take = [&](float x) {
        if (x > own) {
            under = under * expf(own - x);
            own = x;
        }
        under += expf(x - own);
        poison += x * 0.f;
    };
    bool wide = v % 4 == 0 && at16(logits, 0) && at16(dl, 0);
    if (wide) {
#pragma unroll 4
        for (i64 j = 4 * threadIdx.x; j < v; j += 4 * blockDim.x) {
            Pack<float> x = *(const Pack<float> *)(l + j);
#pragma unroll
            for (int q = 0; q < 4; q++) take(capped(x.x[q], cap));
        }
    } else {
        for (i64 j = threadIdx.x; j < v; j += blockDim.x) take(capped(l[j], cap));
    }
    float max = block_max(own, part), raw = l[y], at = capped(raw, cap);
    double sum = block_sum((double)(own == -INFINITY ? 0.f : under * expf(own - max)) + (double)poison, sums);
    double lse = max + log(sum);
    if (threadIdx.x == 0) {
        found[3 * i] = (double)(max - at) + log(sum);
        found[3 * i + 1] = lse;
        found[3 * i + 2] = at >= max;
    }
    if (!want) return;
    float to_grad = (float)(scale * (1 + 2 * zeta * lse) / sum), hit = (float)scale;
    auto grad = [&](float raw, i64 j) {
        float x = capped(raw, cap), d = to_grad * expf(x - max) - (j == y ? hit : 0.f);
        return cap > 0 ? d * (1.f - x / cap * (x / cap)) : d;
    };
    __syncthreads(); // the target's logit has been read by all: d_l may lie over it
    if (wide) {
#pragma unroll 4
        for (i64 j = 4 * threadIdx.x; j < v; j += 4 * blockDim.x) {
            Pack<float> x = *(const Pack<float> *)(l + j);
            struct __align__(4 * sizeof(T)) Four {
                T x[4];
            } d;
#pragma unroll
            for (int q = 0; q < 4; q++) d.x[q] = narrow<T>(grad(x.x[q], j + q));
            *(Four *)(out + j) = d;
        }
    } else {
        for (i64 j = threadIdx.x; j < v; j += blockDim.x) out[j] = narrow<T>(grad(l[j], j));
    }
}

// One block: out[4] = sums over the valid of nll and lse^2, how many are valid and how many of them were the largest; and
// the loss, scale (nll + zeta lse^2).
extern "C" __global__ void cross_entropy_sums(const double *found, const int *targets, i64 n, double scale, double zeta,
                                              double *out, float *loss) {
    __shared__ double part[33];
    double sums[4] = {0, 0, 0, 0};
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        if (targets[i] < 0) continue;
        double lse = found[3 * i + 1];
        sums[0] += found[3 * i];
        sums[1] += lse * lse;
        sums[2] += 1;
        sums[3] += found[3 * i + 2] > 0;
    }
    for (int q = 0; q < 4; q++) sums[q] = block_sum(sums[q], part);
    if (threadIdx.x != 0) return;
    for (int q = 0; q < 4; q++) out[q] = sums[q];
    *loss = (float)(scale * (sums[0] + zeta * sums[1]));
}

// The gradients were computed for an upstream of 1: another one must not pass for it.
extern "C" __global__ void cross_entropy_insist(const float *upstream, T *d) {
    if (threadIdx.x == 0 && *upstream != 1.f) *d = narrow<T>(__int_as_float(0x7fffffff));
}
