// float32 y [T, N] = x [T, K] w: of few rows, w [K, N], or [N, K] with its rows as columns, one product or many of one shape;
// of many rows, one product with w [K, N]. And RMSNorm of a few rows.
#include <vector>

#include "xla/ffi/api/ffi.h"

#include "many_rows.h"
#include "parallel.h"
#include "rows.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kRowsOfTask = 256;  // of w [N, K]

template <class X, class T>
void matmul(const X* x, const T* data, float* y, int64_t rows, int64_t K, int64_t N, bool transposed) {
  thread_local std::vector<float> scratch;
  const Matrix<T> w{data, K, N};
  const int64_t slices = transposed ? 1 : slices_of(K, w.bytes(K, N));
  const int64_t x_stride = transposed ? K : K + kPad, stride = slices > 1 ? N + kPad : N;
  scratch.resize(rows * x_stride + (slices > 1 ? slices * rows * stride : 0));
  float* wide = scratch.data();
  float* parts = slices > 1 ? wide + rows * x_stride : y;  // [slices, rows, N]
  using Numbers = Number<X, Matrix<T>>;
  for (int64_t t = 0; t < rows; t++) {
    widen(x + t * K, K, wide + t * x_stride);
    if (!transposed) prepare<X, Matrix<T>>(wide + t * x_stride, K, slices);
  }
  if (transposed) {
    Phase all(int((N + kRowsOfTask - 1) / kRowsOfTask), [=](int i) {
      int64_t n = i * kRowsOfTask;
      const int64_t end = std::min(N, n + kRowsOfTask);
      for (; n + 4 <= end; n += 4) all_dots<4>(data + n * K, K, wide, rows, y + n, N);
      for (; n < end; n++) all_dots<1>(data + n * K, K, wide, rows, y + n, N);
    });
    return Pool::get().run({&all});
  }
  const Spread spread(slices, N);
  Phase multiply(spread.tasks(), [=](int i) {
    const int64_t slice = spread.of(i), first = slice_begin(K, slices, slice), last = slice_begin(K, slices, slice + 1);
    product(
        w, first, last, reinterpret_cast<const Numbers*>(wide), x_stride, rows, spread.begin(i), spread.end(i),
        parts + slice * rows * stride, stride);
  });
  Phase add(slices > 1 ? int(rows) : 0, [=](int t) {
    std::memcpy(y + t * N, parts + t * stride, N * sizeof(float));
    for (int64_t s = 1; s < slices; s++) add_to(y + t * N, parts + (s * rows + t) * stride, N);
  });
  Pool::get().run({&multiply, &add});
}

// The same for more than kFewRows rows and w [K, N], N a multiple of 16. Rows are widened to floats once; a task multiplies
// at most kRowsATime of them with a strip of columns.
template <class X, class T>
void matmul_of_many(const X* x, const T* data, float* y, int64_t rows, int64_t K, int64_t N) {
  constexpr bool kWidens = !std::is_same_v<X, float>;
  thread_local std::vector<float> scratch;
  if (kWidens) scratch.resize(rows * K);
  float* const wide = scratch.data();
  const float* const from = kWidens ? wide : reinterpret_cast<const float*>(x);
  const int64_t strips = (N + kPanel - 1) / kPanel, blocks = (rows + kRowsATime - 1) / kRowsATime;
  Phase widen_rows(kWidens ? int(rows) : 0, [=](int t) { widen(x + t * K, K, wide + t * K); });
  Phase multiply(int(strips * blocks), [=](int i) {
    alignas(64) static thread_local float sums[kRowsATime * kPanel];
    const float* row[kRowsATime];
    const int64_t first = i / strips * kRowsATime, count = std::min(kRowsATime, rows - first), n = i % strips * kPanel;
    for (int64_t r = 0; r < count; r++) row[r] = from + (first + r) * K;
    const Strip strip = neighbours(n, N);
    product_with_strip<T>(Matrix<T>{data, K, N}, strip, row, count, sums);
    for (int64_t r = 0; r < count; r++)
      std::memcpy(y + (first + r) * N + n, sums + r * kPanel, strip.count * kLanes * sizeof(float));
  });
  Pool::get().run({&widen_rows, &multiply});
}

// As many products of one shape, which lie one behind the other: each is a task.
template <class X, class T>
void matmuls(const X* x, const T* data, float* y, int64_t count, int64_t rows, int64_t K, int64_t N, bool transposed) {
  using Numbers = Number<X, Matrix<T>>;
  Phase all(int(count), [=](int i) {
    thread_local std::vector<float> wide;
    wide.resize(rows * K);
    const X* from = x + i * rows * K;
    const T* w = data + i * K * N;
    float* to = y + i * rows * N;
    for (int64_t t = 0; t < rows; t++) {
      widen(from + t * K, K, wide.data() + t * K);
      if (!transposed) prepare<X, Matrix<T>>(wide.data() + t * K, K, 1);
    }
    if (!transposed) {
      const auto* numbers = reinterpret_cast<const Numbers*>(wide.data());
      return product(Matrix<T>{w, K, N}, 0, K, numbers, K, rows, 0, N, to, N);
    }
    int64_t n = 0;
    for (; n + 4 <= N; n += 4) all_dots<4>(w + n * K, K, wide.data(), rows, to + n, N);
    for (; n < N; n++) all_dots<1>(w + n * K, K, wide.data(), rows, to + n, N);
  });
  Pool::get().run({&all});
}

// f(pointer, pointer) of the types of two buffers, each float32 or bfloat16
template <class F>
ffi::Error by_dtypes(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b, F f) {
  const float* wide = nullptr;
  const bfloat16* narrow = nullptr;
  for (ffi::DataType type : {a.element_type(), b.element_type()})
    if (type != ffi::F32 && type != ffi::BF16)
      return ffi::Error::InvalidArgument("native operation: dtypes must be float32 or bfloat16");
  if (a.element_type() == ffi::F32)
    b.element_type() == ffi::F32 ? f(wide, wide) : f(wide, narrow);
  else
    b.element_type() == ffi::F32 ? f(narrow, wide) : f(narrow, narrow);
  return ffi::Error::Success();
}

ffi::Error handle(ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y, bool transposed) {
  const auto dims = x.dimensions();
  const size_t last = dims.size() - 1;
  const int64_t rows = dims[last - 1], K = dims[last], N = y->dimensions()[last];
  auto call = [&]<class X, class T>(const X*, const T*) {
    const X* from = static_cast<const X*>(x.untyped_data());
    const T* by = static_cast<const T*>(w.untyped_data());
    if (last == 1 && rows > kFewRows && !transposed && N % kLanes == 0)
      return matmul_of_many(from, by, y->typed_data(), rows, K, N);
    if (last == 1) return matmul(from, by, y->typed_data(), rows, K, N, transposed);
    const int64_t count = rows * K ? int64_t(x.element_count()) / (rows * K) : 0;
    matmuls(from, by, y->typed_data(), count, rows, K, N, transposed);
  };
  return by_dtypes(x, w, call);
}

// y = x / sqrt(mean(x^2) + eps) * scale over the last dimension
template <class X, class S, class Y>
void rms_norm(const X* x, const S* scale, Y* y, int64_t rows, int64_t size, float eps) {
  for (int64_t r = 0; r < rows; r++, x += size, y += size) {
    Floats squares = splat(0);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) squares += floats(x + i) * floats(x + i);
    float total = sum(squares);
    for (; i < size; i++) total += float(x[i]) * float(x[i]);
    const float factor = 1.0f / std::sqrt(total / float(size) + eps);
    for (i = 0; i + kLanes <= size; i += kLanes) put(floats(x + i) * factor * floats(scale + i), y + i);
    for (; i < size; i++) put(float(x[i]) * factor * float(scale[i]), y + i);
  }
}

ffi::Error handle_norm(ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> y, float eps) {
  const int64_t size = scale.element_count(), rows = x.element_count() / size;
  auto call = [&]<class X, class S>(const X*, const S*) {
    const X* from = static_cast<const X*>(x.untyped_data());
    const S* by = static_cast<const S*>(scale.untyped_data());
    if (y->element_type() == ffi::F32)
      rms_norm(from, by, static_cast<float*>(y->untyped_data()), rows, size, eps);
    else
      rms_norm(from, by, static_cast<bfloat16*>(y->untyped_data()), rows, size, eps);
  };
  return by_dtypes(x, scale, call);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_matmul, handle,
    ffi::Ffi::Bind()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmoe_rms_norm, handle_norm,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<float>("eps"));
