# The names of transformers that are imported here, by TRL and by PEFT, each from the file that defines it: through the
# package itself the type checker would read 500 families of models. A name that is missing is an error: add its line.

from transformers.cache_utils import Cache as Cache
from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING as CONFIG_MAPPING
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    AutoModelForSequenceClassification as AutoModelForSequenceClassification,
)
from transformers.models.auto.processing_auto import AutoProcessor as AutoProcessor
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.bert.configuration_bert import BertConfig as BertConfig
from transformers.models.bert.modeling_bert import BertForMaskedLM as BertForMaskedLM
from transformers.models.bert.modeling_bert import BertLMHeadModel as BertLMHeadModel
from transformers.models.cohere.configuration_cohere import CohereConfig as CohereConfig
from transformers.models.cohere.modeling_cohere import CohereForCausalLM as CohereForCausalLM
from transformers.models.gemma.configuration_gemma import GemmaConfig as GemmaConfig
from transformers.models.gemma.modeling_gemma import GemmaForCausalLM as GemmaForCausalLM
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config as Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM as Gemma2ForCausalLM
from transformers.models.gemma3.configuration_gemma3 import Gemma3Config as Gemma3Config
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig as Gemma3TextConfig
from transformers.models.gpt2.configuration_gpt2 import GPT2Config as GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel as GPT2LMHeadModel
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.mamba.configuration_mamba import MambaConfig as MambaConfig
from transformers.models.mamba.modeling_mamba import MambaForCausalLM as MambaForCausalLM
from transformers.models.mistral.configuration_mistral import MistralConfig as MistralConfig
from transformers.models.mistral.modeling_mistral import MistralForCausalLM as MistralForCausalLM
from transformers.models.mixtral.configuration_mixtral import MixtralConfig as MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM as MixtralForCausalLM
from transformers.models.olmo.configuration_olmo import OlmoConfig as OlmoConfig
from transformers.models.olmo.modeling_olmo import OlmoForCausalLM as OlmoForCausalLM
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.models.t5.configuration_t5 import T5Config as T5Config
from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration as T5ForConditionalGeneration
from transformers.processing_utils import ProcessorMixin as ProcessorMixin
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.trainer import Trainer as Trainer
from transformers.trainer_callback import TrainerCallback as TrainerCallback
from transformers.training_args import TrainingArguments as TrainingArguments
from transformers.utils.quantization_config import GgufConfig as GgufConfig

__version__: str
