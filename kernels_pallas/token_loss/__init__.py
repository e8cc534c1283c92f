"""The cross-entropy of each token and the gradient of its logits."""

from kernels_pallas.token_loss.api import loss_gradients as loss_gradients
from kernels_pallas.token_loss.reference import LossGradients as LossGradients
from kernels_pallas.token_loss.reference import gradient_of_softmax as gradient_of_softmax
from kernels_pallas.token_loss.reference import softmax_and_nll as softmax_and_nll
from kernels_pallas.token_loss.reference import softmax_terms as softmax_terms
