// A value from each of some mixtures of logistics, out of noise that was drawn beforehand: what `LogisticMixture.sample`
// in models/likelihoods.py says, in one pass. There are a few dozen numbers per row; calling an operator costs more than they.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "torch.h"

namespace {

using tarnn::Tensor;

/// parameters (n, 3·m): logits, means, log-scales; exponential (n, m) and uniform (n) noise; values (n) int64.
void sample_mixture(Tensor parameters, Tensor exponential, Tensor uniform, double temperature, double least, double most, Tensor values) {
  const std::int64_t n = exponential.size(0), m = exponential.size(1);
  const auto of = [](const Tensor& x) { return static_cast<const float*>(x.const_data_ptr()); };
  const float *p = of(parameters), *noise = of(exponential), *u = of(uniform), t = static_cast<float>(temperature);
  auto out = static_cast<std::int64_t*>(values.mutable_data_ptr());
  for (std::int64_t i = 0; i < n; ++i, p += 3 * m, noise += m) {
    std::int64_t which = 0;
    float best = -INFINITY;
    for (std::int64_t j = 0; j < m; ++j) {
      const float score = p[j] / t - std::log(noise[j]);
      if (score > best) best = score, which = j;
    }
    const float scale = std::exp(std::clamp(p[2 * m + which], static_cast<float>(least), static_cast<float>(most)));
    const float point = p[m + which] + t * scale * (std::log(u[i]) - std::log1p(-u[i]));
    const float value = std::nearbyint((point + 1.f) * 127.5f);
    out[i] = value > 0.f ? static_cast<std::int64_t>(std::min(value, 255.f)) : 0;  // a NaN becomes 0, too
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tarnn_cpu, m) {
  m.def("sample_mixture(Tensor parameters, Tensor exponential, Tensor uniform, float temperature, float least, float most, "
        "Tensor(a!) values) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tarnn_cpu, CPU, m) { m.impl("sample_mixture", TORCH_BOX(&sample_mixture)); }
