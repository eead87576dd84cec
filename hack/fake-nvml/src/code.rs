//! NVML's return codes: numbers, names and the words of `nvmlErrorString`.

use nvml_wrapper_sys::bindings::nvmlReturn_t;

/// A return code that is not success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub nvmlReturn_t);

/// What an implemented call ends with.
pub type Answer<T = ()> = Result<T, Code>;

macro_rules! codes {
    ($($name:ident $number:literal $words:literal)*) => {
        #[allow(missing_docs)]
        impl Code { $(pub const $name: Code = Code($number);)* }

        static TABLE: &[(&str, nvmlReturn_t, &std::ffi::CStr)] = &[
            ("SUCCESS", 0, c"Success"),
            $((stringify!($name), $number, $words),)*
        ];
    };
}

codes! {
    UNINITIALIZED 1 c"Uninitialized"
    INVALID_ARGUMENT 2 c"Invalid Argument"
    NOT_SUPPORTED 3 c"Not Supported"
    NO_PERMISSION 4 c"Insufficient Permissions"
    ALREADY_INITIALIZED 5 c"Already Initialized"
    NOT_FOUND 6 c"Not Found"
    INSUFFICIENT_SIZE 7 c"Insufficient Size"
    INSUFFICIENT_POWER 8 c"Insufficient External Power"
    DRIVER_NOT_LOADED 9 c"Driver Not Loaded"
    TIMEOUT 10 c"Timeout"
    IRQ_ISSUE 11 c"Interrupt Request Issue"
    LIBRARY_NOT_FOUND 12 c"NVML Shared Library Not Found"
    FUNCTION_NOT_FOUND 13 c"Function Not Found"
    CORRUPTED_INFOROM 14 c"Corrupted infoROM"
    GPU_IS_LOST 15 c"GPU is lost"
    RESET_REQUIRED 16 c"GPU requires reset"
    OPERATING_SYSTEM 17 c"GPU access blocked by the operating system"
    LIB_RM_VERSION_MISMATCH 18 c"Driver/library version mismatch"
    IN_USE 19 c"In use by another client"
    MEMORY 20 c"Insufficient Memory"
    NO_DATA 21 c"No data"
    VGPU_ECC_NOT_SUPPORTED 22 c"ECC not supported with vGPU"
    INSUFFICIENT_RESOURCES 23 c"Insufficient Resources"
    FREQ_NOT_SUPPORTED 24 c"Requested frequency is not supported"
    ARGUMENT_VERSION_MISMATCH 25 c"Argument version mismatch"
    DEPRECATED 26 c"Deprecated"
    NOT_READY 27 c"Not ready"
    GPU_NOT_FOUND 28 c"No GPUs were found"
    INVALID_STATE 29 c"Invalid state"
    RESET_TYPE_NOT_SUPPORTED 30 c"Reset type not supported"
    UNKNOWN 999 c"Unknown Error"
}

/// The number behind a name, with or without `NVML_ERROR_`, or behind digits.
pub fn parse(word: &str) -> Option<nvmlReturn_t> {
    let upper = word.to_ascii_uppercase();
    let bare = upper.strip_prefix("NVML_ERROR_").or_else(|| upper.strip_prefix("NVML_")).unwrap_or(&upper);
    match TABLE.iter().find(|(name, _, _)| *name == bare) {
        Some((_, number, _)) => Some(*number),
        None => bare.parse().ok(),
    }
}

/// The name of a number, for logs.
pub fn name(number: nvmlReturn_t) -> &'static str {
    TABLE.iter().find(|(_, n, _)| *n == number).map_or("?", |(name, _, _)| name)
}

/// The words of `nvmlErrorString`.
pub fn words(number: nvmlReturn_t) -> &'static std::ffi::CStr {
    TABLE.iter().find(|(_, n, _)| *n == number).map_or(c"Unknown Error", |(_, _, words)| words)
}
