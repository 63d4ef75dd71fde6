//! A limited number of open files or shards.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
};

/// Open resources by number; the least recently used one is closed for another.
///
/// There are two kinds of locks. The lock of the map is held for a look-up only. The lock of an
/// entry is held while one thread opens it, and other threads that need it wait. No thread takes
/// the lock of an entry while it holds that of the map.
pub(crate) struct OpenCache<T> {
    capacity: usize,
    entries: Mutex<CacheEntries<T>>,
}

/// A resource, or `None` until it is open.
type CacheSlot<T> = Arc<Mutex<Option<Arc<T>>>>;

struct CacheEntries<T> {
    slots: BTreeMap<u64, (u64, CacheSlot<T>)>,
    /// Number of look-ups, the time of the last use of an entry.
    n_lookups: u64,
}

impl<T> OpenCache<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        let entries = CacheEntries { slots: BTreeMap::new(), n_lookups: 0 };
        Self { capacity: capacity.max(1), entries: Mutex::new(entries) }
    }

    /// Returns a resource, which `open` opens if necessary.
    pub(crate) fn get<E>(
        &self,
        key: u64,
        open: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        let slot = self.slot(key);
        let resource = slot.lock().unwrap_or_else(PoisonError::into_inner);
        open_once(resource, open)
    }

    /// Like [`read`](Self::read), but returns `None` if another thread is opening the resource.
    pub(crate) fn try_get<E>(
        &self,
        key: u64,
        open: impl FnOnce() -> Result<T, E>,
    ) -> Option<Result<Arc<T>, E>> {
        let slot = self.slot(key);
        let resource = match slot.try_lock() {
            Ok(resource) => resource,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(open_once(resource, open))
    }

    /// Returns the slot of a resource, which is now the most recently used one.
    fn slot(&self, key: u64) -> CacheSlot<T> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.n_lookups += 1;
        let now = entries.n_lookups;
        if let Some((last_use, slot)) = entries.slots.get_mut(&key) {
            *last_use = now;
            return Arc::clone(slot);
        }
        let oldest = if entries.slots.len() < self.capacity {
            None
        } else {
            entries.slots.iter().min_by_key(|(_, (last_use, _))| *last_use).map(|(&key, _)| key)
        };
        let removed = oldest.and_then(|key| entries.slots.remove(&key));
        let slot = CacheSlot::default();
        entries.slots.insert(key, (now, Arc::clone(&slot)));
        drop(entries);
        // Closing may take long, so it happens without the lock.
        drop(removed);
        slot
    }
}

fn open_once<T, E>(
    mut resource: MutexGuard<'_, Option<Arc<T>>>,
    open: impl FnOnce() -> Result<T, E>,
) -> Result<Arc<T>, E> {
    if let Some(resource) = &*resource {
        return Ok(Arc::clone(resource));
    }
    let opened = Arc::new(open()?);
    *resource = Some(Arc::clone(&opened));
    Ok(opened)
}

impl<T> fmt::Debug for OpenCache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenCache").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}
